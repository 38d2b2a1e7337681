"""Log lines about events that others cause, at a bounded rate, so that they cannot fill the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_REASON = 500


@dataclass
class Throttled:
    """Lines of one kind: the first `burst` at once, then one every `every_s` seconds with the number of lines left out.

    For one thread only. `clock` gives monotonic seconds.
    """

    logger: logging.Logger
    what: str
    level: int = logging.WARNING
    burst: int = 10
    every_s: float = 5.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._credit, self._refilled, self._left_out = float(self.burst), self.clock(), 0

    def say(self, reason: object) -> None:
        """Log `reason`, cut short and on one line, or count it."""
        now = self.clock()
        self._credit = min(self.burst, self._credit + (now - self._refilled) / self.every_s)
        self._refilled = now
        if self._credit < 1:
            self._left_out += 1
            return
        self._credit -= 1
        more = f" (and {self._left_out} times more since the last line)" if self._left_out else ""
        text = str(reason)[:MAX_REASON].encode("unicode_escape").decode()
        self.logger.log(self.level, "%s%s: %s", self.what, more, text)
        self._left_out = 0
