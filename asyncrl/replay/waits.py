"""What the learner waits for: seconds without a plan, by what was missing for one."""

from __future__ import annotations

from collections.abc import Callable


class Waits:
    """Seconds of waiting by cause. `clock` gives monotonic seconds.

    Call `asked` whenever a plan was asked for, and `look` now and then: while there is no plan, the time between two
    looks counts for the cause that the first one found.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._cause = ""
        self.seconds = {"labels": 0.0, "episodes": 0.0, "store": 0.0}

    def asked(self, found: bool, missing: Callable[[], str]) -> None:
        """A plan was asked for, and was `found` or not; `missing` tells what is, and is asked when the wait begins."""
        if found:
            self._count()
            self._since = None
        elif self._since is None:
            self._since, self._cause = self._clock(), missing()

    def look(self, missing: Callable[[], str]) -> None:
        """Count the time since the last look, and see what is missing now. Costs nothing while nobody waits."""
        if self._since is not None:
            self._count()
            self._cause = missing()

    def _count(self) -> None:
        if self._since is not None:
            now = self._clock()
            self.seconds[self._cause] += now - self._since
            self._since = now
