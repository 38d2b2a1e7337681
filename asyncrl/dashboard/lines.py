"""A file of JSON lines of any length, read at a few places: the cost is that of the rows that are shown, not of the
rows that there are.

A row is found by seeking to an offset and reading on to the end of the line there. The rows are in the order of their
times, so that a time is found by bisection.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 1 << 14
LONGEST_LINE = 1 << 24
"""A longer line is not searched for its end: what follows it is left out."""
MEASURED = 64
"""The length of a line is the mean of so many."""
NEARBY = 1 << 16
"""A bisection ends where so few bytes are left that they are better read."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LineSpan:
    """Bytes [start, end) of a file, which begin and end with whole lines. `file` tells files apart that had the same
    name one after the other."""

    file: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.start)


class LineFile:
    """An open file of JSON lines that may grow meanwhile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        # The last line may be half written.
        self.whole = LineSpan(status.st_ino, 0, self._line_start(status.st_size))

    def rows(self, span: LineSpan) -> Iterator[Row]:
        """Every row of the span. Lines that are no JSON object are left out."""
        rest, offset = b"", span.start
        while offset < span.end:
            data = os.pread(self._descriptor, min(1 << 20, span.end - offset), offset)
            if not data:
                return
            offset += len(data)
            *lines, rest = (rest + data).split(b"\n")
            yield from filter(None, map(_parsed, lines))

    def sampled(self, span: LineSpan, count: int) -> list[Row]:
        """At most `count` rows at equal distances in bytes, with the first and the last one."""
        places = [span.start + index * span.size // max(1, count - 1) for index in range(count - 1)]
        begins = {self._begin(place, span): None for place in places}
        if span.size:
            begins[self._line_start(span.end - 1)] = None
        return list(filter(None, (_parsed(self._line(begin, span)) for begin in begins)))

    def newest(self, count: int) -> list[Row]:
        """The last `count` rows."""
        start = self.whole.end
        for _ in range(count):
            start = self._line_start(start - 1) if start > 0 else 0
        return list(self.rows(LineSpan(self.whole.file, start, self.whole.end)))

    def estimated_rows(self, span: LineSpan) -> int:
        """How many rows the span has, from the mean length of a few lines."""
        places = [span.start + index * span.size // MEASURED for index in range(MEASURED)]
        lengths = [max(1, len(self._line(self._begin(place, span), span))) for place in places]
        return round(span.size * MEASURED / sum(lengths))

    def between(self, first: float, last: float) -> LineSpan:
        """The rows whose `time` is in [first, last], with one neighbour at each end at least."""
        whole = self.whole
        start = max(whole.start, self._before(first))
        end = min(whole.end, self._before(last) + NEARBY)
        return LineSpan(whole.file, self._line_start(start), self._next_start(end, whole))

    def _before(self, time: float) -> int:
        """An offset whose line is at most `NEARBY` bytes before the first one of `time`."""
        low, high = self.whole.start, self.whole.end
        while high - low > NEARBY:
            middle = (low + high) // 2
            row = _parsed(self._line(self._begin(middle, self.whole), self.whole))
            if row is None or float(row.get("time", 0.0)) >= time:
                high = middle
            else:
                low = middle
        return low

    def _begin(self, offset: int, span: LineSpan) -> int:
        """Where the first line begins that does so at or after `offset`; the end of the span if there is none."""
        return offset if offset == span.start else self._next_start(offset - 1, span)

    def _line(self, begin: int, span: LineSpan) -> bytes:
        """The line that begins there; empty at the end of the span."""
        return os.pread(self._descriptor, self._next_start(begin, span) - begin, begin)

    def _next_start(self, offset: int, span: LineSpan) -> int:
        """The first beginning of a line after `offset`, or the end of the span."""
        limit = min(span.end, offset + LONGEST_LINE)
        while offset < limit:
            data = os.pread(self._descriptor, CHUNK, offset)
            if not data:
                break
            if (found := data.find(b"\n")) >= 0:
                return min(span.end, offset + found + 1)
            offset += len(data)
        return span.end

    def _line_start(self, offset: int) -> int:
        """Behind the last line break before `offset`: the beginning of the line that has the byte there."""
        limit = max(0, offset - LONGEST_LINE)
        while offset > limit:
            begin = max(0, offset - CHUNK)
            data = os.pread(self._descriptor, offset - begin, begin)
            if (found := data.rfind(b"\n")) >= 0:
                return begin + found + 1
            offset = begin
        return 0


@contextmanager
def open_lines(path: Path) -> Iterator[LineFile | None]:
    """The file of lines at `path` as long as the block lasts; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield None
        return
    try:
        yield LineFile(descriptor)
    finally:
        os.close(descriptor)


def _parsed(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
