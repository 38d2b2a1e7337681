"""Rows of a file of JSON lines: all, new, newest, spread over it, and of a range of times."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.runs import lines
from asyncrl.runs.lines import LineFile, LineSpan, decoded, newest_rows, open_lines, read_lines, sampled_rows


@contextmanager
def written(count: int, padding: int) -> Iterator[LineFile]:
    """A file of rows with `time` from 0, of different lengths."""
    rows = [{"step": row, "time": float(row), "text": "x" * (padding * (row % 7))} for row in range(count)]
    with NamedTemporaryFile("w") as written_file:
        written_file.write("".join(f"{json.dumps(row)}\n" for row in rows))
        written_file.flush()
        with open_lines(Path(written_file.name)) as file:
            assert file is not None
            yield file


@pytest.mark.slow
@given(st.integers(0, 60), st.integers(2, 80), st.integers(0, 3000))
def test_a_sample_is_in_order_with_both_ends_and_no_row_twice(count: int, points: int, padding: int) -> None:
    with written(count, padding) as file:
        steps = [row["step"] for row in file.sampled(file.whole, points)]
        newest = [row["step"] for row in file.newest(3)]
        every = [row["step"] for row in file.rows(file.whole)]
    assert steps == sorted(set(steps))
    assert len(steps) <= points
    assert steps[:1] + steps[-1:] == ([0, count - 1] if count else [])[: 2 if steps else 0]
    assert every == list(range(count))
    assert newest == every[-3:]


@pytest.mark.slow
@given(st.integers(1, 3000), st.floats(-5, 3005), st.floats(0, 500))
def test_a_range_of_times_has_all_of_its_rows(count: int, first: float, length: float) -> None:
    with written(count, 50) as file:
        span = file.between(first, first + length)
        found = {row["time"] for row in file.rows(span)}
    assert {float(row) for row in range(count) if first <= row <= first + length} <= found


def write_lines(path: Path, count: int) -> None:
    path.write_text("".join(json.dumps({"step": step, "padding": "x" * (step % 50)}) + "\n" for step in range(count)))


@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 30, 1000])
def test_the_first_and_the_last_row_and_some_between_are_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int, count: int
) -> None:
    monkeypatch.setattr(lines, "WHOLE_BYTES", whole_bytes)
    write_lines(tmp_path / "file", count)
    steps = [row["step"] for row in sampled_rows(tmp_path / "file", 100)]
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert steps[-1] == count - 1
    assert min(count // 2, 50) <= len(steps) <= 100
    assert max([1, *(after - before for before, after in pairwise(steps))]) <= 2 * count // 50 + 2


def test_an_unfinished_line_and_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for found in (read_lines(path), sampled_rows(path), newest_rows(path, 3)):
        assert found == []
    path.write_text('{"step": 0}\nnonsense\n\xff\n[1]\n\n{"step": 1}\n{"st')
    for found in (read_lines(path), sampled_rows(path), newest_rows(path, 99)):
        assert found == [{"step": 0}, {"step": 1}]
    assert newest_rows(path, 1) == [{"step": 1}]


def test_new_rows_are_those_behind_a_position_until_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def new(before: LineSpan) -> tuple[list[int], LineSpan]:
        with open_lines(path) as file:
            assert file is not None
            span = file.since(before.file, before.end)
            return [row["step"] for row in file.rows(span)], span

    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    steps, read = new(LineSpan(0, 0, 0))
    assert steps == [0, 1]
    with path.open("a") as more:
        more.write('ep": 2}\n')
    steps, read = new(read)
    assert steps == [2]
    assert new(read)[0] == []
    other = tmp_path / "other"
    other.write_text('{"step": 7}\n' * 9)
    other.replace(path)
    assert new(read)[0] == [7] * 9


def test_a_line_of_megabytes_is_not_in_the_way_of_others(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{{"time": 0}}\n{{"time": 1, "text": "{"x" * 5_000_000}"}}\n{{"time": 2}}\n')
    with open_lines(path) as file:
        assert file is not None
        assert [row["time"] for row in file.sampled(file.whole, 10)] == [0, 2]
        assert [row["time"] for row in file.rows(file.whole)] == [0, 1, 2]
        assert list(file.rows(LineSpan(0, 0, 0))) == []


class Fields(msgspec.Struct):
    step: int
    loss: float = 0.0


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"step": 3, "loss": 1, "text": "x"}', Fields(3, 1.0)),
        (b'{"step": 3, "loss": Infinity, "other": NaN}', Fields(3, float("inf"))),
        (b'{"loss": 1}', None),
        (b'{"step": "three"}', None),
        (b"nonsense", None),
        (b"\xff", None),
    ],
)
def test_some_fields_of_a_line_are_read_also_beside_numbers_that_are_not_finite(
    line: bytes, found: Fields | None
) -> None:
    assert decoded(msgspec.json.Decoder(Fields), line) == found


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_what_is_no_regular_file_has_no_rows_and_holds_nobody_up(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The address of a socket is short.
    monkeypatch.chdir(tmp_path)
    path = Path("learner.jsonl")
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        case "folder":
            path.mkdir()
    assert read_lines(path) == newest_rows(path, 3) == sampled_rows(path) == []
