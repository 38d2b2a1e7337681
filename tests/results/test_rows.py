"""Rows of a metrics file are thinned out evenly."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from asyncrl.results import rows
from asyncrl.results.rows import thinned_rows


def write_lines(path: Path, count: int) -> None:
    path.write_text("".join(json.dumps({"step": step, "padding": "x" * (step % 50)}) + "\n" for step in range(count)))


@pytest.mark.parametrize("whole_bytes", [0, 1 << 20])
@pytest.mark.parametrize("count", [1, 2, 30, 1000])
def test_the_first_and_the_last_row_and_some_between_are_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int, count: int
) -> None:
    monkeypatch.setattr(rows, "WHOLE_BYTES", whole_bytes)
    write_lines(tmp_path / "file", count)
    steps = [row["step"] for row in thinned_rows(tmp_path / "file", 100)]
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert steps[-1] == count - 1
    assert min(count // 2, 50) <= len(steps) <= 100
    assert max([1, *(after - before for before, after in pairwise(steps))]) <= 2 * count // 50 + 2


def test_lines_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"step": 0}\nnonsense\n[1]\n{"step": 1}\n{"st')
    assert [row["step"] for row in thinned_rows(tmp_path / "file")] == [0, 1]
    assert thinned_rows(tmp_path / "missing") == []
