"""Records spans, the activities of a role with their times, for the timeline that `asyncrl trace` makes.

Recording a span costs a role about a microsecond: a thread encodes and writes the spans every FLUSH_S seconds. An error
of the disk never reaches the role: lost spans are counted, and so are spans that come faster than they can be written.
A killed process loses its newest spans.

A role writes `runs/NAME/spans/ROLE.jsonl`, and appends to it after a restart. When the file has half of the allowed
bytes, it becomes `ROLE.jsonl.old`. An older file of this name is replaced, and its spans count as dropped.

A line with a list is a span: name, track, start, duration and values. Times are whole microseconds, and starts count
from 1970. A line with an object is a note:

- `role`: a process begins to write, or a file begins. The note also has `host`, `pid`, the `endpoint` of a replay, the
  time at which the process `started`, and the number of lines `dropped` so far.
- `clock`: a comparison of clocks, made at this time. The clock of a replay was `ahead` microseconds ahead of this
  process's clock. `peer` is the replay's endpoint. The measurement took `round_trip` microseconds.
- `lost`: the number of spans that this process has lost so far.

Times come from one monotonic clock, which is set by the wall clock when the process starts.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from asyncrl.config.schema import ObserveConfig

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
MOST_WAITING = 100_000
"""The maximum number of spans that may wait to be written. They take about a tenth of a gigabyte."""
FIRST_WINDOW_S, LONGEST_WINDOW_S = 2.0, 60.0
"""The length of the first window and of the longest window, in seconds. A clock estimate is the best measurement in a
window, and each window is twice as long as the one before, up to the longest."""
FOLDER = "spans"
OLD = ".old"

Value = str | int | float | bool | None | Sequence[str]
_Span = tuple[str, str, float, float, Mapping[str, Value]]


class Spans(Protocol):
    """Takes the spans of one process, from any thread.

    A span has a name, and a track: a line of the timeline, on which spans follow each other. Without a track the span
    belongs to the episode that its value `episode` names. Times are seconds of `clock`, which is monotonic.
    """

    @property
    def records(self) -> bool:
        """True if spans are recorded at all."""

    def clock(self) -> float: ...

    def wall(self, at: float) -> float:
        """Seconds since 1970 at the time `at` of `clock`; 0 if nothing is recorded."""
        ...

    def add(self, name: str, start: float, end: float, track: str = "", /, **values: Value) -> None:
        """Record a span that is over."""
        ...

    def span(self, name: str, track: str = "", /, **values: Value) -> AbstractContextManager[dict[str, Value]]:
        """Record the `with` block as a span, even if it raises. The block may add values to the mapping it gets."""
        ...

    def measured_clock(self, peer: str, sent: float, theirs: float, received: float) -> None:
        """Record a measurement of the clock of the replay at the endpoint `peer`, which answered a request at once.
        `theirs` is the `wall` time in its answer. `sent` and `received` are the times of the request and of the answer
        on our `clock`."""
        ...

    def close(self) -> None: ...


class NoSpans:
    """Records nothing."""

    records = False
    clock = staticmethod(time.monotonic)

    def wall(self, at: float) -> float:
        return 0.0

    def add(self, name: str, start: float, end: float, track: str = "", /, **values: Value) -> None:
        pass

    def span(self, name: str, track: str = "", /, **values: Value) -> AbstractContextManager[dict[str, Value]]:
        return _Ignored()

    def measured_clock(self, peer: str, sent: float, theirs: float, received: float) -> None:
        pass

    def close(self) -> None:
        pass


class _Ignored:
    def __enter__(self) -> dict[str, Value]:
        return {}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


class _Block:
    """A block of code that is recorded as a span."""

    __slots__ = ("_name", "_recorder", "_start", "_track", "_values")

    def __init__(self, recorder: SpanRecorder, name: str, track: str, values: dict[str, Value]) -> None:
        self._recorder, self._name, self._track, self._values = recorder, name, track, values

    def __enter__(self) -> dict[str, Value]:
        self._start = self._recorder.clock()
        return self._values

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._values.setdefault("error", kind.__name__)
        recorder = self._recorder
        recorder.add(self._name, self._start, recorder.clock(), self._track, **self._values)


class SpanFile:
    """A file of lines at `path`. Together with the older file in its folder it has at most `most_bytes`."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._file: FileIO | None = None
        self.dropped = 0
        """Lines that were deleted to make room."""

    @property
    def most_at_once(self) -> int:
        """The maximum number of bytes that may be appended at once."""
        return self._most_bytes // 4

    def append(self, lines: bytes, begin: Callable[[], bytes]) -> None:
        """Append whole lines. The lines that `begin` returns are written before the first lines of a process or of a
        file. Raises OSError, after removing the part of the lines that was written."""
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
            self.close()  # Somebody deleted the file.
        begins = self._file is None
        file = self._file = self._file or self._open()
        given = begin() + lines if begins else lines
        size = file.seek(0, os.SEEK_END)
        if size and size + len(given) > self._most_bytes // 2:
            self._rotate()
            file = self._file = self._open()
            given, size = begin() + lines, 0
        try:
            written = file.write(given)
        except OSError:
            self.close()  # The next append begins again, with the lines of `begin`.
            raise
        if written < len(given):
            file.truncate(size)
            self.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(self._path, "a+")
        file.seek(0)
        self.dropped = max(self.dropped, _dropped_before(file.read(1 << 12).split(b"\n")[0]))
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            if file.read(1) != b"\n":  # A killed process left an unfinished line, which readers skip.
                file.write(b"\n")
        return file

    def _rotate(self) -> None:
        old = self._path.with_name(self._path.name + OLD)
        with suppress(FileNotFoundError), old.open("rb") as file:
            self.dropped += sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        self.close()
        self._path.replace(old)


def _dropped_before(line: bytes) -> int:
    """The number of dropped lines, from the note in the first line of a file; 0 for a new file or a damaged note."""
    try:
        note = json.loads(line)
    except (ValueError, RecursionError):
        return 0
    dropped = note.get("dropped") if isinstance(note, dict) else None
    return dropped if isinstance(dropped, int) else 0


class ClockEstimate:
    """Estimates by how many seconds the clock of `peer` is ahead of ours. Of the measurements in each window, it takes
    the one with the shortest round trip."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._best: tuple[float, float, float] | None = None
        self._window_s, self._since = FIRST_WINDOW_S, 0.0

    def add(self, sent: float, theirs: float, received: float) -> None:
        """Add a measurement, by the formula of NTP for a peer that answers at once."""
        round_trip = received - sent
        best = self._best
        if best is None or round_trip < best[0]:
            self._best = round_trip, theirs - (sent + received) / 2, received
        if best is None:
            self._since = received

    def take(self, now: float) -> dict[str, Value] | None:
        """Return the note of a window that is over at `now`, a time of our clock, and begin the next window. Return
        `None` if no window is over."""
        best = self._best
        if best is None or now - self._since < self._window_s:
            return None
        self._window_s, self._best = min(2 * self._window_s, LONGEST_WINDOW_S), None
        round_trip, ahead, at = (_microseconds(seconds) for seconds in best)
        return {"clock": at, "peer": self._peer, "ahead": ahead, "round_trip": round_trip}


class SpanRecorder:
    """Writes the spans of this process to `file`, once `start` was called. `about` describes the process in notes."""

    records = True

    def __init__(
        self,
        file: SpanFile,
        about: Mapping[str, Value],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self.lost = 0
        """The number of lost spans: the disk failed or was too slow, or a span could not be encoded."""
        self._file = file
        self._ahead = wall() - clock()
        self._about = {**about, "started": _microseconds(self.wall(clock()))}
        self._waiting: deque[_Span] = deque()
        self._clocks: dict[str, ClockEstimate] = {}
        self._newest_clocks: dict[Value, dict[str, Value]] = {}
        self._told_lost = 0
        self._failed = False
        self._encoder = msgspec.json.Encoder()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)

    def start(self) -> SpanRecorder:
        self._thread.start()
        return self

    def wall(self, at: float) -> float:
        return at + self._ahead

    def add(self, name: str, start: float, end: float, track: str = "", /, **values: Value) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append((name, track, start, end, values))
        else:
            self.lost += 1

    def span(self, name: str, track: str = "", /, **values: Value) -> AbstractContextManager[dict[str, Value]]:
        return _Block(self, name, track, values)

    def measured_clock(self, peer: str, sent: float, theirs: float, received: float) -> None:
        if theirs:
            self._clocks.setdefault(peer, ClockEstimate(peer)).add(self.wall(sent), theirs, self.wall(received))

    def close(self) -> None:
        """Write the recorded spans. Takes as long as the disk does."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self.flush()
        self._file.close()

    def flush(self) -> None:
        """Write the recorded spans, or count them as lost. Only the thread of this recorder calls it, until `close`."""
        lines = [self._encoded(self._waiting.popleft()) for _ in range(len(self._waiting))]
        batches = list(_batches(list(filter(None, lines)), self._file.most_at_once))
        now = self.wall(self.clock())
        clocks = [note for estimate in list(self._clocks.values()) if (note := estimate.take(now)) is not None]
        told = self.lost
        notes: list[dict[str, Value]] = [*clocks]
        if told > self._told_lost:
            notes.append({"lost": told})
        if notes and self._append([self._lines(notes)]):
            self._told_lost = told
            self._newest_clocks.update((note["peer"], note) for note in clocks)
        for batch in batches:
            if not self._append(batch):
                self.lost += len(batch)

    def _append(self, lines: Sequence[bytes]) -> bool:
        """Write the lines; True if the disk took them."""
        try:
            self._file.append(b"".join(lines), self._begin)
        except OSError as error:
            if not self._failed:
                logger.warning("spans are lost, and will be missing in the timeline: %s", error)
            self._failed = True
            return False
        return True

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_S):
            self.flush()

    def _begin(self) -> bytes:
        return self._lines([{**self._about, "dropped": self._file.dropped}, *self._newest_clocks.values()])

    def _lines(self, notes: Sequence[Mapping[str, Value]]) -> bytes:
        return b"".join(self._encoder.encode(note) + b"\n" for note in notes)

    def _encoded(self, span: _Span) -> bytes:
        """The line of a span. A span that cannot be encoded, or is too long, counts as lost and has an empty line."""
        name, track, start, end, values = span
        try:
            # Both ends are rounded alike, so that a span within another one stays within it.
            begun, ended = _microseconds(start + self._ahead), _microseconds(end + self._ahead)
            line = self._encoder.encode((name, track, begun, max(0, ended - begun), values)) + b"\n"
            if len(line) > self._file.most_at_once:
                raise ValueError(f"its line has {len(line)} bytes")
        except (TypeError, ValueError, OverflowError) as error:
            if not self.lost:
                logger.warning("a span %s is lost: %s", name, error)
            self.lost += 1
            return b""
        return line


def _batches(lines: Sequence[bytes], most_bytes: int) -> Iterator[Sequence[bytes]]:
    """The lines in order, joined to batches of at most `most_bytes` bytes."""
    begin = size = 0
    for at, line in enumerate(lines):
        if size + len(line) > most_bytes and at > begin:
            yield lines[begin:at]
            begin, size = at, 0
        size += len(line)
    if begin < len(lines):
        yield lines[begin:]


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def spans_file(run_dir: Path, role: str) -> Path:
    """The file with the newest spans of a role."""
    return run_dir / FOLDER / f"{role}.jsonl"


def open_spans(config: ObserveConfig, run_dir: Path, role: str, endpoint: str = "") -> Spans:
    """Open the recorder of one role's process. Only a replay gives `endpoint`, its own address. The caller closes
    the recorder."""
    if not config.spans:
        return NoSpans()
    about: dict[str, Value] = {"role": role, "host": socket.gethostname(), "pid": os.getpid(), "endpoint": endpoint}
    return SpanRecorder(SpanFile(spans_file(run_dir, role), config.spans_mb << 20), about).start()
