"""A run whose steps a function rewards: its numbers reach the trained advantages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from asyncrl.replay.stored import StoredRun
from asyncrl.runs import KeptEpisodes
from tests.chaos.world import BATCH, GROUP, World
from tests.end_to_end.step_rewards import fails, numbers
from tests.end_to_end.support import Run

pytestmark = pytest.mark.long

STEPS = 3


def test_the_numbers_of_a_function_are_the_trained_advantages_and_its_failures_cost_single_episodes(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(
        "train",
        *World.make(tmp_path).overrides(1),
        "algorithm=process_grpo",
        "algorithm.advantage.params={normalise_std: false, outcome_weight: 0.0}",
        "scoring.steps=tests.end_to_end.step_rewards.steps",
        "scoring.shaping.prm_aggregation=per_step",
        "actor.step_split=tests.end_to_end.step_rewards.every_fourth",
        "replay.filter.zero_variance=false",
        f"observe.keep_episodes={BATCH // GROUP}",
        "cluster.actors=1",
        "cluster.scorers=1",
        "cluster.learner_ranks=1",
        f"learner.steps={STEPS}",
    )
    run.finish()
    kept = [episode for step in range(STEPS) for episode in KeptEpisodes(run.dir).step(step)]
    assert len(kept) == STEPS * BATCH
    groups: dict[str, list[float]] = {}
    for each in kept:
        rewards = numbers(each.trajectory.member, len(each.trajectory.steps))
        assert each.labels.step_scores.tolist() == rewards
        groups.setdefault(each.trajectory.group_id, []).extend(rewards)
    for each in kept:
        trajectory, mean = each.trajectory, fmean(groups[each.trajectory.group_id])
        left = [reward - mean for reward in numbers(trajectory.member, len(trajectory.steps))]
        expected = np.zeros(len(trajectory), np.float32)
        for index, step in enumerate(trajectory.steps):
            expected[step.start : step.end] = sum(left[index:])
        np.testing.assert_allclose(each.advantages, expected, atol=1e-5)
    with closing(StoredRun(run.dir / "replay")) as stored:
        assert stored.counters()["scoring_failures"] > 0
    assert not any(fails(each.trajectory.id) for each in kept)
