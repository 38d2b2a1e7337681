"""Spans reach their file, which stays bounded and readable, and no fault of the disk reaches the role."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import ObserveConfig
from asyncrl.observe import spans as module
from asyncrl.observe.spans import NoSpans, SpanFile, SpanRecorder, open_spans, spans_file


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_recorder(path: Path, clock: Clock, most_bytes: int = 1 << 20) -> SpanRecorder:
    """One that writes when it is told to."""
    return SpanRecorder(SpanFile(path, most_bytes), {"role": "actor-0"}, clock, lambda: 1000.0)


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_span_is_written_with_its_wall_time_its_values_and_its_error(tmp_path: Path) -> None:
    clock = Clock()
    recorder = make_recorder(tmp_path / "a.jsonl", clock)
    with recorder.span("turn", episode="t1") as values:
        clock.now += 1.5
        values["tokens"] = 7
    with pytest.raises(KeyError), recorder.span("tool", "tools"):
        raise KeyError
    recorder.add("given", 101.0, 101.25, "tickets", count=2)
    recorder.flush()
    assert lines_of(tmp_path / "a.jsonl") == [
        {"role": "actor-0", "started": 1_000_000_000, "dropped": 0},
        ["turn", "", 1_000_000_000, 1_500_000, {"episode": "t1", "tokens": 7}],
        ["tool", "tools", 1_001_500_000, 0, {"error": "KeyError"}],
        ["given", "tickets", 1_001_000_000, 250_000, {"count": 2}],
    ]


def test_a_file_is_continued_behind_an_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"role":"actor-0","dropped":3}\n["turn","",10')
    recorder = make_recorder(path, Clock())
    recorder.add("turn", 100.0, 101.0)
    recorder.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '["turn","",10'
    assert json.loads(lines[2]) == {"role": "actor-0", "started": 1_000_000_000, "dropped": 3}
    assert json.loads(lines[3])[0] == "turn"


def test_the_oldest_spans_go_when_the_bytes_are_used_up_and_are_counted(tmp_path: Path) -> None:
    path, most = tmp_path / "a.jsonl", 4096
    recorder = make_recorder(path, Clock(), most)
    for index in range(400):
        recorder.add("turn", 100.0, 101.0, "", index=index)
        recorder.flush()
        files = [path, path.with_name("a.jsonl.old")]
        assert sum(file.stat().st_size for file in files if file.exists()) <= most + 200
    kept = [line for file in reversed(files) for line in lines_of(file)]
    spans = [line[4]["index"] for line in kept if isinstance(line, list)]
    assert spans == list(range(spans[0], 400))
    notes = [line for line in kept if isinstance(line, dict)]
    # Each file that was dropped had one note.
    assert notes[-1]["dropped"] >= spans[0] > 0


def test_a_full_disk_loses_spans_that_are_counted_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    recorder = make_recorder(blocked / "a.jsonl", Clock())
    for _ in range(2):
        recorder.add("turn", 100.0, 101.0)
        recorder.flush()
    assert recorder.lost == 2
    assert caplog.text.count("spans are lost") == 1
    blocked.unlink()
    recorder.add("turn", 100.0, 101.0)
    recorder.flush()
    assert lines_of(blocked / "a.jsonl")[1] == {"lost": 2}
    recorder.flush()
    assert len(lines_of(blocked / "a.jsonl")) == 3


def test_values_without_an_encoding_and_spans_without_room_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    recorder = make_recorder(tmp_path / "a.jsonl", Clock())
    recorder.add("odd", 100.0, 101.0, "", value=object())  # type: ignore[arg-type]
    recorder.add("odd", 100.0, 101.0, "", value="\ud800")
    for _ in range(4):
        recorder.add("turn", 100.0, 101.0)
    recorder.flush()
    assert recorder.lost == 5
    assert [line[0] for line in lines_of(tmp_path / "a.jsonl") if isinstance(line, list)] == ["turn"]


def test_the_clock_of_a_replay_is_measured_by_the_shortest_round_trip(tmp_path: Path) -> None:
    clock = Clock()
    recorder = make_recorder(tmp_path / "a.jsonl", clock)
    # Our wall is 1000 at 100; theirs is 5 s ahead. One way takes 0.1 s, the other up to a second.
    for back in (1.0, 0.1, 0.5):
        sent = clock.now
        theirs = recorder.wall(sent + 0.1) + 5.0
        clock.now += 0.1 + back
        recorder.measured_clock("tcp://replay", sent, theirs, clock.now)
    recorder.measured_clock("tcp://off", clock.now, 0.0, clock.now)
    recorder.flush()
    assert not (tmp_path / "a.jsonl").exists(), "a window takes a while"
    clock.now += 10.0
    recorder.flush()
    assert lines_of(tmp_path / "a.jsonl")[1:] == [
        {"clock": 1_001_300_000, "peer": "tcp://replay", "ahead": 5_000_000, "round_trip": 200_000}
    ]


def test_a_recorder_is_opened_where_spans_are_wanted(tmp_path: Path) -> None:
    assert isinstance(open_spans(ObserveConfig(spans=False), tmp_path, "actor-0"), NoSpans)
    recorder = open_spans(ObserveConfig(), tmp_path, "actor-0")
    with recorder.span("turn", episode="t1"):
        pass
    recorder.close()
    note, span = lines_of(spans_file(tmp_path, "actor-0"))
    assert note["role"] == "actor-0"
    assert span[0] == "turn"


def test_nothing_is_recorded_without_spans() -> None:
    spans = NoSpans()
    with spans.span("turn", episode="t1") as values:
        values["tokens"] = 1
    spans.add("turn", 0.0, 1.0)
    spans.measured_clock("tcp://replay", 0.0, 1.0, 2.0)
    spans.close()
    assert spans.wall(3.0) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("spans", [20, 3000])
def test_neither_restarts_nor_a_flood_take_more_bytes_than_the_bound(tmp_path: Path, spans: int) -> None:
    path, most = tmp_path / "a.jsonl", 20_000
    for _ in range(20):
        recorder = make_recorder(path, Clock(), most)
        for _ in range(spans):
            recorder.add("turn", 100.0, 101.0, "x", text="y" * 100)
        recorder.close()
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= most
    lines = lines_of(path.with_name("a.jsonl.old")) + lines_of(path)
    assert sum(isinstance(line, list) for line in lines) > 50


def test_a_span_longer_than_the_file_may_be_is_counted_as_lost(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path / "a.jsonl", Clock(), 1000)
    recorder.add("turn", 100.0, 101.0, text="y" * 1000)
    recorder.flush()
    assert recorder.lost == 1


@pytest.mark.parametrize("first", [b"[1]", b"5", b"null", b'{"dropped":null}', b'{"dropped":1e400}', b"[" * 10**5])
def test_a_file_with_a_damaged_beginning_is_continued(tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(first + b"\n")
    recorder = make_recorder(path, Clock())
    recorder.add("turn", 100.0, 101.0)
    recorder.close()
    assert json.loads(path.read_bytes().splitlines()[-1])[0] == "turn"


def test_a_deleted_file_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "spans" / "a.jsonl"
    recorder = make_recorder(path, Clock())
    recorder.add("before", 100.0, 101.0)
    recorder.flush()
    shutil.rmtree(path.parent)
    recorder.add("after", 100.0, 101.0)
    recorder.close()
    about, span = lines_of(path)
    assert (about["role"], span[0]) == ("actor-0", "after")


@pytest.mark.parametrize("start", [float("nan"), float("inf")])
def test_a_span_at_no_time_is_counted_as_lost(tmp_path: Path, start: float) -> None:
    recorder = make_recorder(tmp_path / "a.jsonl", Clock())
    recorder.add("never", start, 101.0)
    recorder.add("turn", 100.0, 101.0)
    recorder.close()
    assert recorder.lost == 1
    assert lines_of(tmp_path / "a.jsonl")[-1][0] == "turn"
