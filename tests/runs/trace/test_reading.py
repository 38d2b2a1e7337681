"""The spans of a run are read on one clock, even if clocks drift and files are damaged."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.observe.spans import OLD
from asyncrl.runs.trace.reading import Trace, TraceSpan, in_order
from tests.runs.trace.support import BEGIN, REPLAY, clock, line, process, write


def starts(trace: Trace, role: str) -> list[float]:
    """Seconds after the beginning of the run."""
    found = trace.spans(lambda each: each.role == role)
    return [round(span.start / 1e6 - BEGIN, 3) for span in found]


def test_a_clock_that_drifts_is_corrected_in_between(tmp_path: Path) -> None:
    write(tmp_path, "replay", [process("replay", endpoint=REPLAY), line("plan", "plans", 1.0, 1.0)])
    drifting = [process("actor-0"), clock(0.0, 2.0), clock(100.0, 4.0), clock(50.0, 9.0, "tcp://other")]
    spans = [line("turn", "", at, at + 10.0, episode="t1") for at in (-5.0, 0.0, 50.0, 100.0, 200.0)]
    write(tmp_path, "actor-0", [*drifting, *spans])
    trace = Trace(tmp_path)
    assert starts(trace, "actor-0") == [-3.0, 2.0, 53.0, 104.0, 204.0]
    assert starts(trace, "replay") == [1.0]
    assert trace.is_aligned


def test_each_start_of_a_process_has_its_own_clock(tmp_path: Path) -> None:
    write(tmp_path, "replay", [process("replay", endpoint=REPLAY)])
    restarted = process("actor-0", started=2)
    lines = [process("actor-0", started=1), clock(0.0, 2.0), line("turn", "", 1.0, 2.0, episode="t1")]
    write(tmp_path, "actor-0", [*lines, restarted, clock(9.0, -3.0), line("turn", "", 10.0, 11.0, episode="t1")])
    assert starts(Trace(tmp_path), "actor-0") == [3.0, 7.0]


def test_shards_of_the_replay_are_aligned_through_those_who_ask_both(tmp_path: Path) -> None:
    for shard in range(2):
        about = process(f"replay-{shard}", endpoint=f"tcp://{shard}")
        write(tmp_path, f"replay-{shard}", [about, line("plan", "plans", 1.0, 1.0)])
    clocks = [clock(0.0, 2.0, "tcp://0"), clock(0.0, 5.0, "tcp://1")]
    write(tmp_path, "learner", [process("learner"), *clocks, line("step", "steps", 1.0, 2.0)])
    trace = Trace(tmp_path)
    assert [starts(trace, role) for role in ("replay-0", "replay-1", "learner")] == [[1.0], [-2.0], [3.0]]


def test_a_host_whose_clock_is_not_known_is_told_of(tmp_path: Path) -> None:
    write(tmp_path, "replay", [process("replay", endpoint=REPLAY)])
    write(tmp_path, "actor-0", [process("actor-0"), line("turn", "", 1.0, 2.0, episode="t1")])
    assert not Trace(tmp_path).is_aligned


def test_damaged_lines_are_skipped_and_counted_and_what_was_dropped_or_lost_is_known(tmp_path: Path) -> None:
    path = write(tmp_path, "actor-0", [process("actor-0", dropped=5), {"lost": 3}])
    old = path.with_name(path.name + OLD)
    old.write_text(f"{json.dumps(process('actor-0'))}\n{json.dumps(line('old', '', 0.0, 1.0))}\n")
    with path.open("a") as file:
        file.write('["turn","",12\n[1,2,3]\n{"broken\n\xff\n')
        file.write(json.dumps(line("new", "", 0.0, 1.0)) + '\n["unfin')
    trace = Trace(tmp_path)
    for _ in range(2):
        assert [span.name for span in trace.spans()] == ["old", "new"]
        assert trace.unreadable == 4, "a second reading counts no line again"
    assert (trace.roles[0].dropped, trace.roles[0].lost) == (5, 3)


def test_what_was_lost_is_added_over_the_starts_of_a_role(tmp_path: Path) -> None:
    first, second = process("actor-0", started=1), process("actor-0", started=2)
    lines = [first, {"lost": 3}, {"lost": 5}, second, {"lost": 2}]
    path = write(tmp_path, "actor-0", [second, {"lost": 4}])
    path.with_name(path.name + OLD).write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert Trace(tmp_path).roles[0].lost == 5 + 4


def test_spans_are_sorted_although_few_fit_into_memory() -> None:
    order = random.Random(0)
    spans = [TraceSpan(order.randrange(50), order.randrange(50), "a", "turn", "", {"n": n}) for n in range(300)]
    expected = sorted(spans, key=lambda span: span.order)
    for at_once in (7, 1000):
        found = list(in_order(spans, at_once))
        assert [span.order for span in found] == [span.order for span in expected]
        assert sorted(span.values["n"] for span in found) == list(range(300))


def test_a_folder_without_spans_is_refused_with_the_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"observe\.spans=false"):
        Trace(tmp_path)
