"""A run whose processes are stopped, one after another, says which of them it waits for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.runs.run import Run as RunReader
from asyncrl.runs.state.watch import RunWatch
from tests.chaos.world import World
from tests.end_to_end.support import Run
from tests.helpers import until

pytestmark = pytest.mark.long

SMALL = ("cluster.actors=1", "cluster.scorers=1", "cluster.learner_ranks=1", "learner.eval_every=0")
LONGEST_S = 120.0


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_run_says_which_process_it_waits_for(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("train", *World.make(tmp_path).overrides(1), *SMALL, "learner.steps=100000")
    watch = RunWatch(RunReader(run.dir))
    until(lambda: watch.look().text.startswith("learner has been starting"), LONGEST_S)
    run.wait_for_step(1)
    for role, before in (
        ("scoring-0", "groups wait for labels: "),
        ("actor-0", "groups wait for episodes: "),
        ("learner", ""),
        ("replay", ""),
    ):
        with stopped(run.processes()[role]):
            cause = f"{before}{role} has been silent for "
            until(lambda cause=cause: cause in watch.look().text, LONGEST_S)  # type: ignore[misc]
        run.wait_for_step(run.newest_step() + 1)
    run.stop()
    assert watch.look().waits == ()
