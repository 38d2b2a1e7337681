"""Writes a timeline in the Chrome trace event format, compressed by gzip. https://ui.perfetto.dev opens such a file.

Each role is shown as a process. It has a thread for each track, and for each slot in which episodes follow each other.
Where spans of one track overlap, it has more threads. Arrows lead from the delivery of an episode to its label, from
there to its group, and from a group to the learner step that trains it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.machine.files import partial_name
from asyncrl.runs.trace.lanes import Lanes, Slots
from asyncrl.runs.trace.reading import TraceSpan, episodes_of

KINDS = ("learner", "replay", "scoring", "actor")
"""The order of the roles in the picture."""
ARROWS = ("deliver", "label", "ready", "fetch")
"""The spans at which arrows begin or end. They are drawn even if they took no time."""
EPISODES_FROM = 1000
"""The index of the first slot among the threads of a process. All other tracks come before."""


def write_perfetto(path: Path, spans: Iterable[TraceSpan], about: Mapping[str, Any]) -> int:
    """Write the spans, which come in the order of their starts, and return their number. `about` is written into the
    file. The file appears at `path` once it is complete, and only if there are spans. Raises OSError: it cannot be
    written."""
    partial = partial_name(path)
    try:
        count = _write(partial, spans, about)
        if count:
            partial.replace(path)
        return count
    finally:
        partial.unlink(missing_ok=True)


def _write(path: Path, spans: Iterable[TraceSpan], about: Mapping[str, Any]) -> int:
    count = 0
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps(dict(about)) + ',"traceEvents":[\n')
        separator = ""
        for event in events(spans):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
            count += event["ph"] in "Xi"
        file.write("\n]}\n")
    return count


def events(spans: Iterable[TraceSpan]) -> Iterator[dict[str, Any]]:
    """The trace events of spans, which come in the order of their starts."""
    drawing = _Drawing()
    for span in spans:
        yield from drawing.events(span)


class _Drawing:
    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str, int], int] = {}
        self._lanes: dict[tuple[str, str], Lanes] = {}
        self._slots: dict[str, Slots] = {}
        self._begin: int | None = None
        self._planned: dict[int, list[str]] = {}
        """The groups that were planned for each step, as long as the learner has not fetched the step's batch."""

    def events(self, span: TraceSpan) -> Iterator[dict[str, Any]]:
        if self._begin is None:
            self._begin = span.start
        if span.role not in self._processes:
            yield from self._process(span.role)
        track, place = span.track, -1
        episode = span.values.get("episode")
        if not track and isinstance(episode, str):
            slots = self._slots.setdefault(span.role, Slots())
            place = slots.slot_of(episode, span.start, span.end)
            track = f"episodes {place}"
        duration = max(1, span.duration) if span.name in ARROWS else span.duration
        lane = self._lanes.setdefault((span.role, track), Lanes()).place(span.start, span.start + duration)
        key = span.role, track, lane
        if key not in self._threads:
            yield from self._thread(key, place)
        at = {"ts": span.start - self._begin, "pid": self._processes[span.role], "tid": self._threads[key]}
        what = {"name": span.name, "cat": span.role.partition("-")[0], "args": span.values}
        yield {"ph": "X", **at, "dur": duration, **what} if duration else {"ph": "i", "s": "t", **at, **what}
        if span.name in ARROWS:
            yield from self._arrows(span, at)

    def _arrows(self, span: TraceSpan, at: Mapping[str, int]) -> Iterator[dict[str, Any]]:
        values = span.values
        match span.name, values.get("episode"), values.get("group"):
            case "deliver", str(episode), _:
                yield _arrow("s", "episode", episode, at)
            case "label", str(episode), _:
                yield _arrow("t", "episode", episode, at)
            case "ready", _, str(group) if isinstance(step := values.get("step"), int):
                for episode in episodes_of(span):
                    yield _arrow("f", "episode", episode, at)
                # A group may be trained in several steps.
                yield _arrow("s", "batch", f"{group} {step}", at)
                self._planned.setdefault(step, []).append(group)
            case "fetch", _, _ if isinstance(step := values.get("step"), int):
                for group in self._planned.pop(step, ()):
                    yield _arrow("f", "batch", f"{group} {step}", at)

    def _process(self, role: str) -> Iterator[dict[str, Any]]:
        number = self._processes[role] = len(self._processes) + 1
        kind = role.partition("-")[0]
        order = KINDS.index(kind) if kind in KINDS else len(KINDS)
        yield _about("process_name", number, 0, {"name": role})
        yield _about("process_sort_index", number, 0, {"sort_index": 1000 * order + number})

    def _thread(self, key: tuple[str, str, int], place: int) -> Iterator[dict[str, Any]]:
        role, track, lane = key
        number = self._threads[key] = len(self._threads) + 1
        process = self._processes[role]
        order = number % EPISODES_FROM if place < 0 else EPISODES_FROM * (1 + place) + lane
        yield _about("thread_name", process, number, {"name": f"{track} ({lane + 1})" if lane else track})
        yield _about("thread_sort_index", process, number, {"sort_index": order})


def _about(name: str, process: int, thread: int, values: Mapping[str, str | int]) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": process, "tid": thread, "name": name, "args": values}


def _arrow(phase: str, kind: str, name: str, at: Mapping[str, int]) -> dict[str, Any]:
    """The start, the middle or the end of an arrow, at the beginning of the span that was drawn last."""
    number = f"0x{xxhash.xxh64_hexdigest(f'{kind} {name}'.encode())}"
    return {"ph": phase, **at, "name": kind, "cat": "flow", "id": number, **({"bp": "e"} if phase == "f" else {})}
