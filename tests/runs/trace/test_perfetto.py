"""The file for Perfetto keeps to the rules of the trace event format."""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

from asyncrl.runs.trace.lanes import Lanes, Slots
from asyncrl.runs.trace.perfetto import events, write_perfetto
from asyncrl.runs.trace.reading import Trace, TraceSpan, in_order
from tests.runs.trace.support import write_run

Event = dict[str, Any]


def require_valid(found: list[Event]) -> None:
    """Times are sorted, spans of a thread lie within each other or follow each other, and everything has its name."""
    names = {(event["pid"], event["tid"]) for event in found if event["ph"] == "M" and event["name"] == "thread_name"}
    timed = [event for event in found if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    open_ends: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for event in timed:
        thread = event["pid"], event["tid"]
        assert thread in names
        ends = open_ends[thread]
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert not ends or event["ts"] + event["dur"] <= ends[-1]
            ends.append(event["ts"] + event["dur"])
        elif event["ph"] in "stf":
            assert ends, "an arrow touches a span"


def named(found: list[Event], name: str, phase: str = "X") -> list[Event]:
    return [event for event in found if event["name"] == name and event["ph"] == phase]


def test_a_run_becomes_a_file_with_a_process_a_role_and_arrows_from_episodes_to_the_step(tmp_path: Path) -> None:
    write_run(tmp_path, ahead=100.0)
    path = tmp_path / "trace.json.gz"
    count = write_perfetto(path, in_order(Trace(tmp_path).spans()), {"run": "small"})
    with gzip.open(path) as file:
        written = json.load(file)
    found = written["traceEvents"]
    require_valid(found)
    assert written["otherData"] == {"run": "small"}
    assert count == len([event for event in found if event["ph"] in "Xi"]) == 31
    processes = {event["args"]["name"] for event in named(found, "process_name", "M")}
    assert processes == {"actor-0", "learner", "replay"}
    # The actor's clock is corrected: its episodes begin when their tickets do.
    assert [event["ts"] for event in named(found, "episode")] == [event["ts"] for event in named(found, "ticket")]
    arrows = {event["id"] for event in found if event["ph"] == "s"}
    ends = [event for event in found if event["ph"] == "f"]
    assert {event["id"] for event in ends} <= arrows
    fetch = named(found, "fetch")[0]
    assert [event["name"] for event in ends if event["tid"] == fetch["tid"]] == ["batch"] * 2
    assert sum(event["name"] == "episode" for event in ends) == 2


def test_any_spans_make_a_valid_picture() -> None:
    order = random.Random(3)
    spans = []
    for _ in range(2000):
        start, seconds = order.randrange(5000), order.choice((0, 1, 10, 300))
        values = {"episode": f"t{order.randrange(40)}"} if order.random() < 0.7 else {}
        spans.append(TraceSpan(start, seconds, f"actor-{order.randrange(3)}", "turn", "" if values else "x", values))
    require_valid(list(events(in_order(spans))))


def test_spans_that_overlap_get_lines_of_their_own() -> None:
    lanes = Lanes()
    assert [lanes.place(*span) for span in [(0, 10), (2, 8), (3, 9), (8, 10), (10, 12)]] == [0, 0, 1, 0, 0]


def test_an_episode_keeps_its_slot_and_leaves_it_to_a_later_one() -> None:
    slots = Slots()
    spans = [("a", 0, 10), ("b", 1, 5), ("a", 2, 3), ("c", 5, 9), ("d", 6, 7), ("b", 20, 21)]
    assert [slots.slot_of(*span) for span in spans] == [0, 1, 0, 1, 2, 0]
