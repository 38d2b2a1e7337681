"""The command around the demo's run."""

from __future__ import annotations

import pytest

from asyncrl.demo.command import preparation_threads


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (64, 4)])
def test_a_small_machine_prepares_the_demo_with_one_thread_and_a_large_one_with_few(cpus: int, threads: int) -> None:
    assert preparation_threads(cpus) == threads
