"""Measures how long pushes of new weights stop the servers of a fleet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from asyncrl.observe.spans import NoSpans, Spans

logger = logging.getLogger(__name__)


class PushPauses:
    """Measures how long each push stops a server: from the call to stop until the server may sample again.

    `clock` must be the clock of `spans`, in seconds; `spans` records each stop. The preparation of the update, and a
    drain (the wait for running requests), are not part of a stop. A server's first version and failed updates are not
    counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, spans: Spans | None = None) -> None:
        self.clock = clock
        self._spans = spans or NoSpans()
        self._count = 0
        self._total_s = self._last_s = self._longest_s = 0.0

    @property
    def counters(self) -> dict[str, float]:
        """The number of times that pushes stopped servers, the total seconds of these stops, and the seconds of the
        last and of the longest one."""
        return {
            "push_pauses": self._count,
            "push_pause_s": self._total_s,
            "push_pause_last_s": self._last_s,
            "push_pause_max_s": self._longest_s,
        }

    def add(self, url: str, version: int, told: float, stopped: float, loaded: float) -> None:
        """Record a stop of the server at `url`, which may sample again now. `told`, `stopped` and `loaded` are the
        times at which the server was told to stop, had stopped, and had loaded `version`."""
        now = self.clock()
        for name, start, end in (("pause", told, now), ("stop", told, stopped), ("load", stopped, loaded)):
            self._spans.add(name, start, end, url, version=version)
        self._last_s = now - told
        self._count += 1
        self._total_s += self._last_s
        self._longest_s = max(self._longest_s, self._last_s)
        parts = [1000 * seconds for seconds in (self._last_s, stopped - told, loaded - stopped, now - loaded)]
        logger.info(
            "version %d stopped %s for %.1f ms: %.1f until it stopped, %.1f to load, %.1f until it continued",
            *(version, url, *parts),
        )
