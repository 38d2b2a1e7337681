"""The command around the demo's run."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.commands.demo.__main__ import preparation_threads, try_next


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (64, 4)])
def test_a_small_machine_prepares_the_demo_with_one_thread_and_a_large_one_with_few(cpus: int, threads: int) -> None:
    assert preparation_threads(cpus) == threads


@pytest.mark.parametrize("folder", ["runs/demo", "/scratch/somebody/experiments/of/a/whole/year/demo"])
def test_what_to_try_next_stands_in_a_column_however_long_the_folder_is(folder: str) -> None:
    lines = try_next(Path(folder)).splitlines()[2:]
    assert len({line.index(line.split("  ")[-1].strip()) for line in lines}) == 1
