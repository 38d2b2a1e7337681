"""How long there was nothing to do."""

from __future__ import annotations

from collections.abc import Callable


class IdleClock:
    """Counts requests at work, and the seconds without any. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._idle = 0.0
        self._since = self._started
        self.running = 0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._started

    @property
    def idle_seconds(self) -> float:
        return self._idle + (self._clock() - self._since if self.running == 0 else 0.0)

    def enter(self) -> None:
        if self.running == 0:
            self._idle += self._clock() - self._since
        self.running += 1

    def leave(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._since = self._clock()
