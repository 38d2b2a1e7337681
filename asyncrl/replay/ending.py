"""The end of a run whose roles were started by hand: the learner says that the run is done, and every worker hears it.

Nothing of it is stored. A learner that sends a request after the end continues the run, such as one that was restarted
with more steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

SOONEST_S, LATEST_S = 1.0, 10.0
"""The shortest and the longest time for which the replay serves after the end of the run. Its last replies leave within
the first. The second is for workers that are busy."""


class RunEnd:
    """The end of the run, if it is done, and the workers that know of it. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._told: set[str] = set()

    def begin(self) -> None:
        """The learner has done its last step. A second call changes nothing."""
        if self._since is None:
            self._since = self._clock()

    def revoke(self) -> None:
        """A learner continues the run."""
        self._since = None
        self._told.clear()

    def tell(self, worker: str) -> bool:
        """Tell a worker. True if the run is done."""
        if self._since is not None:
            self._told.add(worker)
        return self._since is not None

    def is_over(self, workers: Callable[[], Collection[str]]) -> bool:
        """True if no process still needs the replay. `workers` gives the workers that have asked lately. It is
        called only after the end, since there may be thousands."""
        if self._since is None:
            return False
        waited = self._clock() - self._since
        return waited >= LATEST_S or (waited >= SOONEST_S and self._told.issuperset(workers()))
