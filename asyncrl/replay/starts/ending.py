"""Ends a run whose roles were started by hand: the learner reports that the run is done, and the replay tells every
worker.

The end is not stored. If a learner sends a request after the end, for example after a restart with more steps, the run
continues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

SOONEST_S, LATEST_S = 1.0, 10.0
"""The shortest and the longest time for which the replay serves after the end of the run. The shortest time is needed
to send the last replies. The longest time lets busy workers learn that the run is done."""


class RunEnd:
    """Records when the run ended, and which workers know it. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: float | None = None
        self._told: set[str] = set()

    def begin(self) -> None:
        """Note that the learner has done its last step. A second call has no effect."""
        if self._since is None:
            self._since = self._clock()

    def revoke(self) -> None:
        """Note that a learner continues the run."""
        self._since = None
        self._told.clear()

    def tell(self, worker: str) -> bool:
        """True if the run is done. From then on the worker counts as one that knows it."""
        if self._since is not None:
            self._told.add(worker)
        return self._since is not None

    def is_over(self, workers: Callable[[], Collection[str]]) -> bool:
        """True if no process still needs the replay. `workers` returns the workers with recent requests, and is called
        only after the end, since there may be thousands of them."""
        if self._since is None:
            return False
        waited = self._clock() - self._since
        return waited >= LATEST_S or (waited >= SOONEST_S and self._told.issuperset(workers()))
