"""Tokens that are too old to be trained: the gradient of a step, its lags, and the batch that a plan makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.batch import Totals
from asyncrl.config.schema import PartConfig, TrainConfig
from asyncrl.learner.batch.local_batch import build_local_batch
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.step_metrics import lag_counts
from asyncrl.types import NO_VERSION, runs_of
from tests.helpers import make_trajectory
from tests.learner.support import make_config
from tests.learner.test_trainer import Setup, padded_logprobs

FIRST = 3
"""The oldest version whose tokens are trained."""


class WithOldTokens(Setup):
    """A batch of version 4. The first half of the sampled tokens of each trajectory is too old, and so is the whole
    first trajectory."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks)
        trajectories = []
        for index, each in enumerate(self.trajectories):
            sampled = np.flatnonzero(each.loss_mask)
            versions = np.full(len(each), NO_VERSION, np.int32)
            versions[sampled] = 4
            versions[sampled[: len(sampled) if index == 0 else len(sampled) // 2]] = 1
            trajectories.append(structs.replace(each, version_runs=runs_of(versions)))
        self.trajectories = trajectories
        self.young = [each.versions >= FIRST for each in trajectories]
        groups = [f"{member // config.learner.group_size}" for member in self.members]
        self.totals = Totals.of([int(each.sum()) for each in self.young], groups, self.members)
        self.episodes = replace(self.episodes, version=4)
        self.batch = build_local_batch(
            self.members, trajectories, ranks.device, first_trained=[FIRST] * len(trajectories)
        )


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_loss_and_gradient_are_those_of_a_computation_by_hand(
    aggregation: str, model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """The gradient of a token is its advantage times the gradient of its log-prob, since ppo's ratios are 1 here."""
    config = make_config(model, tmp_path)
    config.algorithm.correction, config.algorithm.loss = [], PartConfig("ppo")
    config.algorithm.aggregation = PartConfig(aggregation)
    setup = WithOldTokens(config, ranks)
    prepared = setup.prepared([setup.members])
    loss, gradient = setup.gradient(prepared, [[3], [0, 1, 2], [4, 6, 7], [5]])
    again, other = setup.gradient(prepared, [setup.members])
    assert loss == pytest.approx(again, abs=1e-6)

    bare = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    logprobs = padded_logprobs(bare, setup.batch).split([len(each) for each in setup.trajectories])
    rewards = setup.episodes.reward.double().cpu().view(-1, config.learner.group_size)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    total = torch.zeros((), dtype=torch.float64)
    for own, young, advantage in zip(logprobs, setup.young, advantages.tolist(), strict=True):
        taken = own[torch.from_numpy(young)].double()
        share = max(1, len(taken)) if aggregation == "seq-mean-token-mean" else 1
        total = total - advantage * (taken - taken.detach()).exp().sum() / share
    expected = total / (setup.totals.sequences if aggregation == "seq-mean-token-mean" else setup.totals.tokens)
    expected.backward()
    assert setup.totals.sequences == len(setup.trajectories) - 1
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for ours, second, theirs in zip(gradient, other, bare.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.grad, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours, second, atol=1e-5, rtol=1e-4)
    assert max(float(each.abs().max()) for each in gradient) > 1e-3


def test_only_trained_tokens_have_a_lag() -> None:
    versions = [np.array([-1, -1, *own], np.int32) for own in ([0, 3], [3, 4], [0, 1])]
    trajectories = [make_trajectory(versions=each, length=4) for each in versions]
    batch = build_local_batch([0, 1, 2], trajectories, torch.device("cpu"), first_trained=[3, 3, 3])
    assert batch.tokens.old is not None
    assert batch.tokens.old.tolist() == [False, False, True, False] + [False] * 4 + [False, False, True, True]
    assert lag_counts(batch.tokens, 4, 1).tolist() == [0, 2, 0]
    assert build_local_batch([0], trajectories[1:2], torch.device("cpu"), first_trained=[3]).tokens.old is None
