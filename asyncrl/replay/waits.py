"""What the learner waits for: seconds without a plan, by what was missing for one."""

from __future__ import annotations

from collections.abc import Callable


class Waits:
    """Seconds of waiting by cause. `clock` gives monotonic seconds.

    Call `asked` whenever a plan was asked for, and `look` now and then: while there is no plan, the time between two
    looks counts for the cause that the second one finds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self.seconds = {"labels": 0.0, "episodes": 0.0}

    def asked(self, found: bool, missing: Callable[[], str]) -> None:
        """A plan was asked for, and was `found` or not."""
        if found:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        else:
            self.look(missing)

    def look(self, missing: Callable[[], str]) -> None:
        """Count the time since the last look; `missing` tells the cause, and is asked only if somebody waits."""
        if self._since is None:
            return
        now = self._clock()
        if now > self._since:
            self.seconds[missing()] += now - self._since
            self._since = now
