"""Reads files of JSON lines, which may be large and may grow while they are read. A row is a line with a JSON object.

A last line that is still being written, and lines that are not rows, are left out. A path that is not a regular file,
such as a pipe, counts as no file. The newest rows, the rows between two times, and samples of a large file are read
without the rest of the file. Rows are in the order of their `time`, so bisection finds the rows between two times.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.observe.sinks.json_lines import LONGEST_LINE

T = TypeVar("T")
Row = dict[str, Any]

CHUNK = 1 << 14
BLOCK = 1 << 20
MEASURED = 64
"""The number of lines from which the mean length of a line is estimated."""
NEARBY = 1 << 16
"""A bisection ends at this number of bytes: reading them is faster than halving them again."""
MOST_SAMPLED = 2000
WHOLE_BYTES = 16 << 20
"""A file of at most this size is read whole to be sampled."""


@dataclass(frozen=True, slots=True)
class LineSpan:
    """Bytes [start, end) of a file, from the beginning of a line to the end of a line. `file` identifies the file: a
    later file may have the same name."""

    file: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.start)


class LineFile:
    """An open file of lines. `whole` is the span of the lines that it had when it was opened."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        # The last line may be half written.
        self.whole = LineSpan(status.st_ino, 0, self._line_start(status.st_size))

    def since(self, file: int, offset: int) -> LineSpan:
        """The lines after `offset` if the open file is still `file`; all lines if it is another file or has become
        shorter."""
        same = file == self.whole.file and offset <= self.whole.end
        return LineSpan(self.whole.file, offset if same else 0, self.whole.end)

    def lines(self, span: LineSpan) -> Iterator[bytes]:
        """Every line of the span, without its newline."""
        pieces, offset = [b""], span.start
        while offset < span.end:
            data = os.pread(self._descriptor, min(BLOCK, span.end - offset), offset)
            if not data:
                return
            offset += len(data)
            first, *others = data.split(b"\n")
            pieces.append(first)
            if others:
                yield b"".join(pieces)
                yield from others[:-1]
                pieces = others[-1:]

    def rows(self, span: LineSpan) -> Iterator[Row]:
        """Every row of the span."""
        return filter(None, map(parsed, self.lines(span)))

    def sampled(self, span: LineSpan, count: int) -> list[Row]:
        """Sample at most `count` rows at equal distances in bytes, with the first and the last one."""
        places = [span.start + index * span.size // max(1, count - 1) for index in range(count - 1)]
        begins = {self._begin(place, span): None for place in places}
        if span.size:
            begins[self._line_start(span.end - 1)] = None
        return list(filter(None, (parsed(self._line(begin, span)) for begin in begins)))

    def oldest(self, count: int) -> list[Row]:
        """The first `count` rows."""
        return list(islice(self.rows(self.whole), count))

    def newest(self, count: int) -> list[Row]:
        """The rows among the last `count` lines."""
        start = self.whole.end
        for _ in range(count):
            start = self._line_start(start - 1) if start > 0 else 0
        return list(self.rows(LineSpan(self.whole.file, start, self.whole.end)))

    def newest_bytes(self, count: int) -> LineSpan:
        """The whole lines among the last `count` bytes."""
        whole = self.whole
        return LineSpan(whole.file, self._begin(max(0, whole.end - count), whole), whole.end)

    def estimated_rows(self, span: LineSpan) -> int:
        """Estimate the number of rows in the span from the mean length of a few lines."""
        places = [span.start + index * span.size // MEASURED for index in range(MEASURED)]
        lengths = [max(1, len(self._line(self._begin(place, span), span))) for place in places]
        return round(span.size * MEASURED / sum(lengths))

    def between(self, first: float, last: float) -> LineSpan:
        """The span of the rows whose `time` is in [first, last], with at least one more row at each end, if the file
        has one there."""
        whole = self.whole
        start = max(whole.start, self._before(first))
        end = min(whole.end, self._before(last) + NEARBY)
        return LineSpan(whole.file, self._line_start(start), self._next_start(end, whole))

    def _before(self, time: float) -> int:
        """An offset at most `NEARBY` bytes before the first row that is not earlier than `time`."""
        low, high = self.whole.start, self.whole.end
        while high - low > NEARBY:
            middle = (low + high) // 2
            row = parsed(self._line(self._begin(middle, self.whole), self.whole))
            if row is None or (finite(row.get("time")) or 0.0) >= time:
                high = middle
            else:
                low = middle
        return low

    def _begin(self, offset: int, span: LineSpan) -> int:
        """The first beginning of a line at or after `offset`. The end of the span if there is none nearby."""
        return offset if offset == span.start else self._next_start(offset - 1, span)

    def _line(self, begin: int, span: LineSpan) -> bytes:
        """The line that begins at `begin`; empty at the end of the span."""
        return os.pread(self._descriptor, self._next_start(begin, span) - begin, begin)

    def _next_start(self, offset: int, span: LineSpan) -> int:
        """The first beginning of a line after `offset`. The end of the span if no line ends in LONGEST_LINE bytes."""
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
        """The offset after the last end of a line before `offset`; 0 if there is none within LONGEST_LINE bytes."""
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
    """Open the file of lines at `path` until the `with` block ends; `None` if there is no regular file."""
    try:
        # Opening a pipe without a writer must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        # Opening a socket raises ENXIO. A socket counts as no file.
        if error.errno != errno.ENXIO:
            raise
        yield None
        return
    try:
        yield LineFile(descriptor) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    finally:
        os.close(descriptor)


def each_line(path: Path) -> Iterator[bytes]:
    """Every line of a file, without its newline; none if the file does not exist."""
    with open_lines(path) as file:
        if file is not None:
            yield from file.lines(file.whole)


def each_row(path: Path) -> Iterator[Row]:
    """Every row of a file, one at a time in memory."""
    return filter(None, map(parsed, each_line(path)))


def read_lines(path: Path) -> list[Row]:
    """All rows of a file."""
    return list(each_row(path))


def newest_rows(path: Path, count: int) -> list[Row]:
    """The rows among the last `count` lines of a file."""
    with open_lines(path) as file:
        return [] if file is None else file.newest(count)


def sampled_rows(path: Path, most: int = MOST_SAMPLED) -> list[Row]:
    """Sample at most `most` rows of a file in their order, evenly spread, with the first and the last of them."""
    with open_lines(path) as file:
        if file is None:
            return []
        if file.whole.size > WHOLE_BYTES:
            return file.sampled(file.whole, most)
        rows = list(file.rows(file.whole))
    count = len(rows)
    return rows if count <= most else [rows[number * (count - 1) // (most - 1)] for number in range(most)]


def finite(value: Any) -> float | None:
    """The value if it is a finite number within the range of floats, else `None`."""
    try:
        return value if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def measured(rows: Iterable[Row]) -> Iterator[Row]:
    """Reduce rows to their numbers, NaN and infinities included. Rows without an integer `step` or a finite `time`
    are left out: files of a run may have any content."""
    for row in rows:
        found = {name: value for name, value in row.items() if _is_number(value)}
        if isinstance(found.get("step"), int) and finite(found.get("time")) is not None:
            yield found


def _is_number(value: Any) -> bool:
    # An integer may be beyond the range of floats.
    return isinstance(value, float) or (isinstance(value, int) and finite(value) is not None)


def parsed(line: bytes) -> Row | None:
    """The row of a line; None if it is malformed."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def decoded(decoder: msgspec.json.Decoder[T], line: bytes) -> T | None:
    """Read only the fields that the decoder's type names, which is many times faster than the whole row. The result is
    None if a field is missing or of another type."""
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        # The standard library writes and reads numbers that are not finite, which JSON lacks.
        return msgspec.convert(parsed(line), decoder.type)
    except (msgspec.ValidationError, UnicodeEncodeError):
        # UnicodeEncodeError: a text has half of a surrogate pair.
        return None


class Tail:
    """The newest values in a growing file, and its `recent` newest rows. Each byte is read once. With `only_numbers`
    rows are as `measured` gives them.

    A learner that resumes replaces its file, which is then read from the beginning."""

    def __init__(self, path: Path, recent: int = 1, only_numbers: bool = False) -> None:
        self._path = path
        self._only_numbers = only_numbers
        self._file_id = self._position = 0
        self.values: Row = {}
        self.recent: deque[Row] = deque(maxlen=recent)

    def read(self) -> Row:
        """Map each name that occurs in the file to its newest value."""
        with open_lines(self._path) as file:
            if file is not None:
                span = file.since(self._file_id, self._position)
                rows = file.rows(span)
                for row in measured(rows) if self._only_numbers else rows:
                    self.recent.append(row)
                    self.values.update(row)
                self._file_id, self._position = span.file, span.end
        return self.values

    def skip(self) -> None:
        """Leave out everything that the file has so far."""
        self.read()
        self.values.clear()
        self.recent.clear()
