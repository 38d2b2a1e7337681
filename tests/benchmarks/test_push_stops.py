"""The steps of a stop, from the times that server and actor wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.push_stops import measured, read_times, table
from benchmarks.timed_sglang import STEPS, _timed


def test_each_step_counts_from_the_call_that_stops_the_server_to_its_end(tmp_path: Path):
    """Steps outside of a stop do not count. Answers count from their last call, and a sleep from its begin."""
    file = tmp_path / "times"
    file.write_text(
        "frontend answers\t9.000\t9.001\n"
        "scheduler abort\t10.002\t10.003\n"
        "frontend answers\t10.010\t10.012\n"
        "frontend answers\t10.020\t10.025\n"
        "scheduler idle\t10.015\t11.000\n"
        "scheduler loads\t10.040\t10.045\n"
        "scheduler loads\t12.000\t13.000\n"
    )
    found = measured([(10.0, 10.03, 10.05, 10.06)], read_times(file))
    assert found.until == {
        "scheduler abort": 3.0,
        "scheduler idle": 15.0,
        "frontend answers": 25.0,
        "actor has the answers": 30.0,
        "scheduler loads": 45.0,
        "actor has loaded": 50.0,
        "actor continues": 60.0,
    }
    assert found.lasts["scheduler loads"] == 5.0
    lines = table([{"way": "kept", "until_ms": found.until, "lasts_ms": found.lasts}]).splitlines()
    assert lines[0].split() == ["kept"]
    assert lines[-1].split() == ["actor", "continues", "60.0"]


async def test_a_timed_method_answers_as_before_and_writes_also_if_it_fails():
    begun: list[float] = []

    def plain(number: int) -> int:
        return 1 // number

    async def awaited(number: int) -> int:
        return 1 // number

    assert _timed(plain, begun.append)(1) == 1
    assert await _timed(awaited, begun.append)(1) == 1
    with pytest.raises(ZeroDivisionError):
        _timed(plain, begun.append)(0)
    with pytest.raises(ZeroDivisionError):
        await _timed(awaited, begun.append)(0)
    assert len(begun) == 4
    assert all(len(target) == 3 for target in STEPS.values())
