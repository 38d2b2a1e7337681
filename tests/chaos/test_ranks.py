"""A learner of two ranks, one of which is gone or hangs: the run says so and goes on from the checkpoint."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.monkey import ranks_of
from tests.chaos.world import World
from tests.end_to_end.support import Run
from tests.helpers import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run that has trained a few steps."""
    run = Run("train", tmp_path, *World.make(tmp_path).overrides(1), "learner.steps=1000000")
    try:
        run.wait_for_step(2)
        yield run
    finally:
        run.stop()


def learner(run: Run) -> int:
    return int(json.loads((run.dir / "processes.json").read_text())["learner"])


def goes_on_with_other_ranks(run: Run, before: dict[str, int]) -> None:
    reached = max(line["step"] for line in run.steps())
    run.wait_for_step(reached + 3)
    assert not any(psutil.pid_exists(pid) for pid in before.values())
    assert len(ranks_of(learner(run))) == 2


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has not run for")]
)
def test_a_rank_that_dies_or_hangs_ends_all_with_the_reason_and_the_run_goes_on(
    number: signal.Signals, reason: str, run: Run
) -> None:
    before = ranks_of(learner(run))
    os.kill(before["rank-1"], number)
    until(lambda: f"rank 1 of 2 {reason}" in (run.dir / "logs" / "learner.log").read_text())
    goes_on_with_other_ranks(run, before)


def test_killing_the_process_that_started_the_ranks_leaves_none_behind_and_the_run_goes_on(run: Run) -> None:
    before = ranks_of(learner(run))
    run.kill("learner")
    until(lambda: not any(psutil.pid_exists(pid) for pid in before.values()))
    goes_on_with_other_ranks(run, before)
