"""Logs events at a bounded rate, so that the clients that cause these events cannot fill the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.errors import AsyncrlError

MAX_REASON = 500
FIRST_COUNT_S = 10.0
LONGEST_COUNT_S = 3600.0
MAX_DISTINCT = 32
LEFT_OUT = " (and {} times more since the last line)"
"""The part of a line that says how many lines were left out before it. Views of a run count the lines that were left
out, too."""


@dataclass
class Throttled:
    """Logs lines of one kind, at a bounded rate.

    - `what`: the words with which each line begins
    - `burst`: the number of lines that may be written without a pause
    - `every_s`: the seconds after which one further line may be written. This line says how many lines were left out

    Only one thread may use it. `clock` gives monotonic seconds.
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
        """Log `reason`, cut short and on one line. If no line may be written now, count it."""
        now = self.clock()
        self._credit = min(self.burst, self._credit + (now - self._refilled) / self.every_s)
        self._refilled = now
        if self._credit < 1:
            self._left_out += 1
            return
        self._credit -= 1
        more = LEFT_OUT.format(self._left_out) if self._left_out else ""
        text = str(reason)[:MAX_REASON].encode("unicode_escape").decode()
        self.logger.log(self.level, "%s%s: %s", self.what, more, text)
        self._left_out = 0


@dataclass
class ErrorLogger:
    """Logs errors that may repeat. The first of a kind is logged with its traceback. Later ones are counted, and the
    count is logged at intervals that double. Two errors are of one kind if their first causes have the same type and
    were raised at the same line. All kinds after the first MAX_DISTINCT count as one kind. An AsyncrlError is logged
    without a traceback. Only one thread may use it. `clock` gives monotonic seconds.
    """

    logger: logging.Logger
    clock: Callable[[], float] = time.monotonic
    _seen: dict[object, _Repeated] = field(default_factory=dict, init=False)

    def exception(self, text: str, error: BaseException, traced: bool = True) -> None:
        """Log `text` about `error`, or count the error. `traced` is false for an expected error, which needs no
        traceback."""
        cause = _first_cause(error)
        place: object = _place(cause)
        if place not in self._seen and len(self._seen) >= MAX_DISTINCT:
            place = "others"
        if (known := self._seen.get(place)) is None:
            self._seen[place] = _Repeated(self.clock() + FIRST_COUNT_S)
            trace = error if traced and not isinstance(cause, AsyncrlError) else None
            self.logger.warning("%s", text, exc_info=trace)
            return
        known.count += 1
        if self.clock() >= known.due:
            self.logger.warning("%s (this error came %d times since its last line)", text, known.count)
            known.interval_s = min(LONGEST_COUNT_S, 2 * known.interval_s)
            known.count, known.due = 0, self.clock() + known.interval_s


@dataclass
class _Repeated:
    """A kind of error that was logged. Its next line is due at `due`, and `count` errors came since the last line."""

    due: float
    interval_s: float = FIRST_COUNT_S
    count: int = 0


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _place(error: BaseException) -> tuple[type[BaseException], str, int]:
    """Return the type of an error, and the file and line at which it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (type(error), "", 0) if trace is None else (type(error), trace.tb_frame.f_code.co_filename, trace.tb_lineno)
