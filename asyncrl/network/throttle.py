"""Log lines about events that others cause, at a bounded rate, so that they cannot fill the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MAX_REASON = 500


class Throttled:
    """Lines of one kind: the first `burst` at once, then one every `every_s` seconds with the number of lines left out.

    For one thread only. `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        logger: logging.Logger,
        what: str,
        level: int = logging.WARNING,
        burst: int = 10,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._what = what
        self._level = level
        self._burst = burst
        self._every_s = every_s
        self._clock = clock
        self._credit = float(burst)
        self._refilled = clock()
        self._left_out = 0

    def say(self, reason: object) -> None:
        """Log `reason`, cut short and on one line, or count it."""
        now = self._clock()
        self._credit = min(self._burst, self._credit + (now - self._refilled) / self._every_s)
        self._refilled = now
        if self._credit < 1:
            self._left_out += 1
            return
        self._credit -= 1
        more = f" (and {self._left_out} times more since the last line)" if self._left_out else ""
        text = str(reason)[:MAX_REASON].encode("unicode_escape").decode()
        self._logger.log(self._level, "%s%s: %s", self._what, more, text)
        self._left_out = 0
