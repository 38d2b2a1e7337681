"""Kills of roles and ranks of a whole run, which goes on; `make chaos` makes many."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.monkey import chaos
from tests.chaos.world import World
from tests.end_to_end.support import Run
from tests.helpers import has_ended, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run that has trained a few steps."""
    with Run("train", tmp_path, *World.make(tmp_path).overrides(1), "learner.steps=1000000") as run:
        run.wait_for_step(2)
        yield run


def goes_on_with_other_ranks(run: Run, before: dict[str, int]) -> None:
    run.wait_for_step(run.newest_step() + 3)
    assert all(has_ended(pid) for pid in before.values())
    assert len(run.ranks()) == 2


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has not run for")]
)
def test_a_rank_that_dies_or_hangs_ends_all_with_the_reason_and_the_run_goes_on(
    number: signal.Signals, reason: str, run: Run
) -> None:
    before = run.ranks()
    os.kill(before["learner-1"], number)
    until(lambda: f"rank 1 of 2 {reason}" in (run.dir / "logs" / "learner.log").read_text())
    goes_on_with_other_ranks(run, before)


def test_killing_the_process_that_started_the_ranks_leaves_none_behind_and_the_run_goes_on(run: Run) -> None:
    before = run.ranks()
    assert len(before) == 2
    run.kill("learner")
    until(lambda: all(has_ended(pid) for pid in before.values()))
    goes_on_with_other_ranks(run, before)


def test_a_run_whose_roles_are_killed_loses_nothing_and_learns_the_same(tmp_path: Path) -> None:
    verdict = chaos(tmp_path, kills=8, seed=0, shards=1)
    assert verdict["broken"] == []
    assert verdict["kills"] == 8
    ended = sum(verdict[fate] for fate in ("trained", "evicted", "filtered", "dropped", "dead", "waiting"))
    assert verdict["acknowledged"] == ended > 0
    assert verdict["trained"] == verdict["steps"] * 8
    assert verdict["filtered"] > 0
