"""A greedily decoded member of a group is a baseline: its reward counts, and no loss trains its tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from asyncrl.config.schema import PartConfig
from asyncrl.learner.batch.local_batch import build_episodes, build_local_batch, without_greedy
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.step_metrics import lag_counts, lag_values, step_histograms, step_values
from asyncrl.learner.step_result import StepResult
from asyncrl.runs.kept import KeptEpisodes
from asyncrl.types import BatchPlan, Trajectory
from tests.helpers import make_labels, make_trajectory
from tests.learner.support import VOCABULARY, PlannedReplay, Run, assert_weights_equal, make_config


def make_plan(**changes: list[int]) -> BatchPlan:
    """A plan of two groups of two, each with 4 sampled tokens of 6."""
    return BatchPlan(3, 5, list("abcd"), ["g", "g", "h", "h"], [6] * 4, [4] * 4, [1.0] * 4, **changes)


def test_a_plan_trains_no_token_of_the_first_member_of_a_group() -> None:
    plan = without_greedy(make_plan())
    assert list(plan.trained_tokens) == [0, 4, 0, 4]
    assert list(plan.sampled) == [4, 4, 4, 4]
    trajectories = [make_trajectory(length=6) for _ in range(4)]
    tokens = build_local_batch(range(4), trajectories, torch.device("cpu"), first_trained=plan.first_trained).tokens
    assert tokens.old is not None
    trained = tokens.mask & ~tokens.old
    assert tokens.sequence[trained].unique().tolist() == [1, 3]
    assert tokens.sequence[tokens.mask].unique().tolist() == [0, 1, 2, 3]


def test_tokens_of_other_members_that_are_too_old_stay_untrained() -> None:
    plan = without_greedy(make_plan(first_trained=[2] * 4, trained=[3, 1, 4, 0]))
    assert list(plan.trained_tokens) == [0, 1, 0, 0]
    assert list(plan.first_trained)[1::2] == [2, 2]


def test_a_batch_of_which_only_greedy_members_are_young_has_no_lags() -> None:
    plan = without_greedy(make_plan())
    tokens = build_local_batch(
        [0], [make_trajectory(length=6)], torch.device("cpu"), first_trained=plan.first_trained[:1]
    ).tokens
    assert lag_values(lag_counts(tokens, 5, 2)) == {}


def test_the_metrics_of_episodes_are_those_of_the_trained_members() -> None:
    told = []
    for greedy_reward, greedy_length in ((0.0, 4), (9.0, 40)):
        plan = replace(make_plan(), sampled=[greedy_length, 4, greedy_length, 6])
        rewards = [greedy_reward, 0.25, greedy_reward, 0.75]
        labels = [make_labels(name, reward) for name, reward in zip(plan.ids, rewards, strict=True)]
        episodes = build_episodes(plan, labels, torch.device("cpu"), greedy_sibling=True)
        lags, result = torch.zeros(4, dtype=torch.int64), StepResult()
        values = step_values(plan, episodes, lags, result, Progress())
        assert values.pop("tokens_sampled") == sum(plan.sampled)
        told.append((values, step_histograms(episodes, lags, result)))
    assert told[0] == told[1]
    assert told[0][0]["reward/mean"] == told[0][0]["outcome/mean"] == 0.5
    assert told[0][0]["length/max"] == 6


class OtherGreedyTokens(PlannedReplay):
    """The same batches, in which the greedy members wrote other tokens."""

    def batch(self, step: int) -> list[tuple[Trajectory, float]]:
        batch = super().batch(step)
        for index in range(0, len(batch), self.config.learner.group_size):
            trajectory, reward = batch[index]
            tokens = np.where(trajectory.loss_mask, VOCABULARY - 1 - trajectory.tokens, trajectory.tokens)
            batch[index] = structs.replace(trajectory, tokens=tokens.astype(np.int32)), reward
        return batch


@pytest.mark.slow
def test_what_a_greedy_member_wrote_changes_no_weight_whatever_the_loss_adds_to_the_policys(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    runs = []
    for replay in (PlannedReplay, OtherGreedyTokens):
        config = make_config(model, tmp_path / replay.__name__, steps=2)
        algorithm = config.algorithm
        algorithm.advantage, algorithm.greedy_sibling = PartConfig("remax"), True
        algorithm.kl, algorithm.entropy_weight = PartConfig("k3", {"weight": 0.1}), 0.01
        algorithm.stream = [PartConfig("ce", {"weight": 0.2})]
        algorithm.correction = [PartConfig("truncate"), PartConfig("normalise")]
        runs.append(Run(config, replay(config)).train(ranks))
    one, other = runs
    assert_weights_equal(one.final, other.final)
    assert one.metrics.of("loss") == other.metrics.of("loss")
    assert all(one.metrics.of("grad_norm").values())


@pytest.mark.slow
def test_a_kept_greedy_member_is_not_shown_as_too_old(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = make_config(model, tmp_path, steps=1)
    config.algorithm.advantage, config.algorithm.greedy_sibling = PartConfig("remax"), True
    config.observe.keep_episodes = 3
    Run(config).train(ranks)
    rows = KeptEpisodes(tmp_path / "run").rows()
    assert any(row.member == 0 for row in rows)
    assert not any(row.masked for row in rows)
