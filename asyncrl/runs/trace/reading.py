"""Reads the spans of a run, and converts their times to the clock of its replay. `observe.spans` describes the files.

A file that a role still appends to is read up to its last complete line. Lines that cannot be read, which a killed
process may leave, are skipped and counted.
"""

from __future__ import annotations

import heapq
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from asyncrl.errors import ConfigError
from asyncrl.observe.spans import FOLDER, OLD
from asyncrl.runs.lines import decoded, each_line

SORTED_AT_ONCE = 200_000
"""The maximum number of spans that are sorted in memory. If there are more, temporary files are used."""
US = 1_000_000


class TraceSpan(msgspec.Struct, array_like=True, gc=False):
    """A span of a role, in microseconds since 1970 on the clock of the replay. The role recorded the `values`."""

    start: int
    duration: int
    role: str
    name: str
    track: str
    values: dict[str, Any]

    @property
    def end(self) -> int:
        return self.start + self.duration

    @property
    def seconds(self) -> float:
        return self.duration / US

    @property
    def order(self) -> tuple[int, int]:
        """A key that sorts by start; a span comes before the spans within it."""
        return self.start, -self.duration


class _Line(msgspec.Struct, array_like=True, gc=False):
    name: str
    track: str
    start: int
    duration: int
    values: dict[str, Any]


class _Note(msgspec.Struct):
    role: str = ""
    host: str = ""
    endpoint: str = ""
    started: int = 0
    dropped: int = 0
    lost: int = 0
    clock: int | None = None
    peer: str = ""
    ahead: int = 0


_LINES, _NOTES = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Note)
_SPANS = msgspec.json.Decoder(TraceSpan)


@dataclass
class _Clock:
    """The lead of the replays' clocks: how far they are ahead of the clock of one process. `samples` maps the endpoint
    of each replay to pairs of a time and the lead of the replay's clock at that time."""

    samples: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def ahead_of(self, endpoint: str) -> Callable[[int], int]:
        """Return a function that gives the correction of a time. It is piecewise linear, so that a time within a span
        stays within the span."""
        samples = sorted(self.samples.get(endpoint, ()))
        if len({ahead for _, ahead in samples}) <= 1:
            only = samples[0][1] if samples else 0
            return lambda at: only
        times, ahead = np.array(samples, dtype=np.float64).T
        return lambda at: round(float(np.interp(at, times, ahead)))


@dataclass
class RoleSpans:
    """The files of one role, the older one first, and the content of their notes."""

    role: str
    paths: list[Path]
    endpoint: str = ""
    hosts: set[str] = field(default_factory=set)
    dropped: int = 0
    lost: int = 0
    unreadable: int = 0
    """The number of lines that the newest whole reading of the spans could not read."""
    clocks: dict[int, _Clock] = field(default_factory=dict)
    """Maps the time at which each process of the role started to the clock of that process."""

    @property
    def kind(self) -> str:
        """The kind of the role: replay, actor, scoring or learner."""
        return self.role.partition("-")[0]

    def look(self) -> None:
        """Read the notes."""
        clock, started = _Clock(), 0
        lost = defaultdict[int, int](int)
        for line in chain.from_iterable(map(each_line, self.paths)):
            if line[:1] == b"{" and (note := decoded(_NOTES, line)) is not None:
                if note.role:
                    started = note.started
                    clock = self.clocks.setdefault(started, _Clock())
                    self.endpoint = note.endpoint or self.endpoint
                    self.hosts.add(note.host)
                    self.dropped = max(self.dropped, note.dropped)
                elif note.clock is not None:
                    samples = clock.samples.setdefault(note.peer, [])
                    if (note.clock, note.ahead) not in samples[-1:]:
                        samples.append((note.clock, note.ahead))
                # Each process counts from 0.
                lost[started] = max(lost[started], note.lost)
        self.lost = sum(lost.values())

    def spans(self, correction: Callable[[_Clock], Callable[[int], int]]) -> Iterator[TraceSpan | None]:
        """All spans in the order of the files; `None` for a line that cannot be read."""
        correct: Callable[[int], int] = lambda at: 0  # noqa: E731
        for line in chain.from_iterable(map(each_line, self.paths)):
            if line[:1] != b"[":
                note = decoded(_NOTES, line)
                if note is None:
                    yield None
                elif note.role:
                    correct = correction(self.clocks.get(note.started, _Clock()))
                continue
            found = decoded(_LINES, line)
            if found is None:
                yield None
                continue
            start, end = found.start, found.start + found.duration
            start, end = start + correct(start), end + correct(end)
            yield TraceSpan(start, max(0, end - start), self.role, found.name, found.track, found.values)


class Trace:
    """All spans of a run in the folder `run_dir`. Raises ConfigError: it has none."""

    def __init__(self, run_dir: Path) -> None:
        folder = run_dir / FOLDER
        files = sorted(folder.glob("*.jsonl"))
        if not files:
            raise ConfigError(f"there are no spans in {folder}: the run has not begun, or has observe.spans=false")
        self.run_dir = run_dir
        self.roles = [RoleSpans(file.stem, [file.with_name(file.name + OLD), file]) for file in files]
        for role in self.roles:
            role.look()
        replays = [role for role in self.roles if role.endpoint]
        self._reference = replays[0].endpoint if replays else ""
        self._replays = {role.role: self._ahead_of_reference(role.endpoint) for role in replays}

    def spans(self, wanted: Callable[[RoleSpans], bool] = lambda role: True) -> Iterator[TraceSpan]:
        """The spans of the wanted roles, one role after another. The spans of a role are in the order in which they
        ended."""
        for role in filter(wanted, self.roles):
            unreadable = 0
            for span in role.spans(lambda clock, role=role: self._correction(role, clock)):  # type: ignore[misc]
                if span is None:
                    unreadable += 1
                else:
                    yield span
            role.unreadable = unreadable

    @property
    def unreadable(self) -> int:
        """The number of lines that could not be read so far, each counted once."""
        return sum(role.unreadable for role in self.roles)

    @property
    def is_aligned(self) -> bool:
        """True if the run has one host only, or if every role except the replays has measured the lead of a replay's
        clock."""
        hosts = {host for role in self.roles for host in role.hosts}
        known = all(role.endpoint or any(each.samples for each in role.clocks.values()) for role in self.roles)
        return len(hosts) <= 1 or known

    def _correction(self, role: RoleSpans, clock: _Clock) -> Callable[[int], int]:
        if role.role in self._replays:
            shift = -self._replays[role.role]
            return lambda at: shift
        return clock.ahead_of(self._reference)

    def _ahead_of_reference(self, endpoint: str) -> int:
        """The time by which one replay's clock is ahead of the first replay's, as measured by roles that are connected
        to both."""
        seen = []
        for clock in (clock for role in self.roles for clock in role.clocks.values()):
            ours, theirs = (clock.samples.get(each) for each in (endpoint, self._reference))
            if ours and theirs:
                seen.append(np.median([ahead for _, ahead in ours]) - np.median([ahead for _, ahead in theirs]))
        return round(float(np.median(seen))) if seen else 0


def in_order(spans: Iterable[TraceSpan], at_once: int = SORTED_AT_ONCE) -> Iterator[TraceSpan]:
    """The spans sorted by their start, with at most `at_once` of them in memory."""
    with ExitStack() as stack:
        parts: list[Iterator[TraceSpan]] = []
        few: list[TraceSpan] = []
        for span in spans:
            few.append(span)
            if len(few) >= at_once:
                parts.append(_spilled(sorted(few, key=_order), stack.enter_context(tempfile.TemporaryFile())))
                few = []
        yield from heapq.merge(*parts, iter(sorted(few, key=_order)), key=_order)


def _order(span: TraceSpan) -> tuple[int, int]:
    return span.order


def _spilled(spans: Iterable[TraceSpan], file: IO[bytes]) -> Iterator[TraceSpan]:
    encoder = msgspec.json.Encoder()
    file.writelines(encoder.encode(span) + b"\n" for span in spans)
    file.seek(0)
    return map(_SPANS.decode, file)


def text_of(values: Mapping[str, Any], key: str) -> str:
    """A value that should be text; "" if it is not."""
    found = values.get(key)
    return found if isinstance(found, str) else ""


def number_of(values: Mapping[str, Any], key: str) -> int | None:
    """A value that should be a whole number; `None` if it is not."""
    found = values.get(key)
    return found if isinstance(found, int) else None


def episodes_of(group: TraceSpan) -> list[str]:
    """The names of the episodes in the span of a group."""
    found = group.values.get("episodes")
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
