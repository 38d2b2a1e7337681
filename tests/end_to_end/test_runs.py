"""Whole runs: synchronous ones are on-policy, chance teaches nothing, a stop is clean, a second start resumes."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from asyncrl.demo.command import CACHE, SEED, prepared_overrides
from asyncrl.demo.prepare import prepare
from asyncrl.demo.report import summarise
from asyncrl.types import Task, Trajectory
from tests.end_to_end.support import ROOT, Run, read_config


@pytest.fixture(scope="module")
def prepared() -> list[str]:
    return prepared_overrides(prepare(ROOT / CACHE, SEED, lambda _: None))


def by_chance(task: Task, answer: str, trajectory: Trajectory) -> float:
    """A rule that knows nothing."""
    return float(random.Random(trajectory.id).random() < 0.5)


def test_synchronous_training_is_on_policy_and_engine_and_learner_agree(tmp_path: Path, prepared: list[str]) -> None:
    run = Run("train", tmp_path, *prepared, "replay.max_lag=0", "learner.steps=4", "learner.eval_every=0")
    run.finish()
    steps = run.steps()
    assert [line["lag/max"] for line in steps] == [0.0] * 4
    assert [line["mismatch/agree"] for line in steps] == [1.0] * 4


def test_a_policy_whose_reward_is_chance_does_not_learn(tmp_path: Path, prepared: list[str]) -> None:
    rule = "scoring.rule=tests.end_to_end.test_runs.by_chance"
    run = Run("train", tmp_path, *prepared, rule, "scoring.shaping.process_weight=0", "learner.steps=12")
    run.finish()
    rewards = [line["outcome/mean"] for line in run.steps()]
    assert all(0.25 < reward < 0.75 for reward in rewards), rewards


def test_a_stop_is_clean_and_the_same_command_resumes(tmp_path: Path, prepared: list[str]) -> None:
    changes = (*prepared, "learner.steps=8", "learner.checkpoint_every=2", "learner.eval_every=0")
    first = Run("train", tmp_path, *changes)
    first.wait_for_step(3)
    started = time.monotonic()
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(30) == 130, first.output
    stopped_in = time.monotonic() - started
    assert "resume" in first.output
    other = Run("train", tmp_path, *changes, "learner.lr=1")
    assert other.process.wait(60) == 2
    assert "learner.lr" in other.output
    second = Run("train", tmp_path, *changes)
    second.finish()
    assert second.steps()[-1]["step"] == 7
    assert min(line["step"] for line in second.steps()[len(first.steps()) :]) >= 2
    summary = summarise(read_config(second.dir), second.dir, 1.0)
    assert (summary["lost"], summary["trained_twice"], summary["trajectories_trained"]) == (0, 0, 8 * 64)
    assert stopped_in < 30


def test_two_learner_ranks_train_the_same_loop(tmp_path: Path, prepared: list[str]) -> None:
    run = Run("train", tmp_path, *prepared, "cluster.learner_ranks=2", "learner.steps=2", "learner.eval_every=0")
    run.finish()
    assert [line["step"] for line in run.steps()] == [0, 1]


def test_a_wrong_configuration_ends_with_a_message_before_anything_starts(tmp_path: Path, prepared: list[str]) -> None:
    for change, fix in (
        ("actor.tools=[abacus]", "there is no tool 'abacus'"),
        ("scoring.rule=guess", "use one of"),
        ("learner.batch_size=63", "multiple of learner.group_size"),
    ):
        run = Run("train", tmp_path, *prepared, change)
        assert run.process.wait(60) == 2, run.output
        assert fix in run.output
        assert "Traceback" not in run.output
    assert not run.dir.exists()
