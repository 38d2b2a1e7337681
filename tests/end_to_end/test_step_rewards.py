"""Runs whose steps a function or an agent rewards: the numbers reach the trained advantages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from asyncrl.observe.kept.episode import KeptEpisode
from asyncrl.replay.stored import StoredRun
from asyncrl.runs import KeptEpisodes
from tests.chaos.world import BATCH, GROUP, World
from tests.end_to_end.step_rewards import TURNS, fails, numbers
from tests.end_to_end.support import Run

pytestmark = pytest.mark.long

STEPS = 3
HERE = "tests.end_to_end.step_rewards"
Start = Callable[..., Run]


def trained(start: Start, folder: Path, *words: str) -> tuple[Run, list[KeptEpisode]]:
    """A finished run of World with process_grpo, without a standard deviation and an outcome, and all that it
    trained."""
    run = start(
        "train",
        *World.make(folder).overrides(1),
        "algorithm=process_grpo",
        "algorithm.advantage.params={normalise_std: false, outcome_weight: 0.0}",
        "replay.filter.zero_variance=false",
        f"observe.keep_episodes={BATCH // GROUP}",
        "cluster.actors=1",
        "cluster.scorers=1",
        "cluster.learner_ranks=1",
        f"learner.steps={STEPS}",
        *words,
    )
    run.finish()
    kept = [episode for step in range(STEPS) for episode in KeptEpisodes(run.dir).step(step)]
    assert len(kept) == STEPS * BATCH
    return run, kept


def check_advantages(kept: list[KeptEpisode], rewards: Callable[[KeptEpisode], dict[int, float]]) -> None:
    """Check that a token's advantage is the sum of the centred rewards of all steps that end after it. `rewards` gives
    the rewards of an episode by the ends of their steps. The mean is that of all rewards of the group."""
    groups: dict[str, list[float]] = {}
    for each in kept:
        assert dict(zip(each.labels.step_ends, each.labels.step_scores, strict=True)) == rewards(each)
        groups.setdefault(each.trajectory.group_id, []).extend(rewards(each).values())
    for each in kept:
        mean, expected = fmean(groups[each.trajectory.group_id]), np.zeros(len(each.trajectory))
        for end, reward in rewards(each).items():
            expected[:end] += reward - mean
        np.testing.assert_allclose(each.advantages, np.where(each.trajectory.loss_mask, expected, 0), atol=1e-5)
        assert np.abs(each.advantages).max() > 0.1


def test_the_numbers_of_a_function_are_the_trained_advantages_and_its_failures_cost_single_episodes(
    start: Start, tmp_path: Path
) -> None:
    words = (
        f"scoring.steps={HERE}.steps",
        "scoring.shaping.prm_aggregation=per_step",
        f"actor.step_split={HERE}.every_fourth",
    )
    run, kept = trained(start, tmp_path, *words)

    def rewards(each: KeptEpisode) -> dict[int, float]:
        steps = each.trajectory.steps
        found = numbers(each.trajectory.member, len(steps))
        return {step.end: number for step, number in zip(steps, found, strict=True)}

    check_advantages(kept, rewards)
    with closing(StoredRun(run.dir / "replay")) as stored:
        assert stored.counters()["scoring_failures"] > 0
    assert not any(fails(each.trajectory.id) for each in kept)


def test_the_rewards_that_an_agent_gives_its_turns_are_the_trained_advantages(start: Start, tmp_path: Path) -> None:
    _, kept = trained(start, tmp_path, f"actor.agent={HERE}.three_turns", "actor.max_turns=3")

    def rewards(each: KeptEpisode) -> dict[int, float]:
        ends = [turn.end for turn in each.trajectory.turns if turn.role == "assistant"]
        return {end: reward for end, reward in zip(ends, TURNS, strict=True) if reward is not None}

    check_advantages(kept, rewards)
