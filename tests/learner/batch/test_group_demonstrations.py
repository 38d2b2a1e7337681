"""Demonstrations in groups: the gradient of a step, what it measures and keeps, and that a kill repeats none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.batch import Totals
from asyncrl.config.schema import PartConfig, TrainConfig
from asyncrl.learner.batch.local_batch import build_episodes, build_local_batch
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.step_metrics import lag_counts
from asyncrl.runs.kept import KeptEpisodes
from asyncrl.types import DEMONSTRATED, BatchPlan, Labels
from tests.learner.support import PlannedReplay, Run, assert_weights_equal, make_config, with_group_demonstrations
from tests.learner.test_trainer import Setup, padded_logprobs

pytestmark = pytest.mark.slow


class WithDemonstrations(Setup):
    """Two groups of four, each with a demonstration after its members."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks)
        self.trajectories, self.rewards = zip(*PlannedReplay(config).batch(0), strict=True)
        count = len(self.trajectories)
        self.plan = BatchPlan(
            step=0,
            version=0,
            ids=[f"{member}" for member in range(count)],
            group_ids=[f"{member // 5}" for member in range(count)],
            tokens=[len(each) for each in self.trajectories],
            sampled=[each.sampled_tokens for each in self.trajectories],
            weights=[1.0] * count,
            demonstrations=[4, 9],
        )
        labels = [Labels(name, reward, reward, "s") for name, reward in zip(self.plan.ids, self.rewards, strict=True)]
        self.members = list(range(count))
        self.totals = Totals.of(self.plan.sampled, self.plan.group_ids, self.members)
        self.episodes = build_episodes(self.plan, labels, ranks.device)
        self.batch = build_local_batch(self.members, self.trajectories, ranks.device)


@pytest.mark.parametrize("weight", ["none", "shaped"])
def test_loss_and_gradient_are_those_of_a_computation_by_hand(
    weight: str, model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """The formula of the loss is short here: on-policy members have the ratio 1 at this first update."""
    config = with_group_demonstrations(make_config(model, tmp_path), weight)
    config.algorithm.correction, config.algorithm.loss = [], PartConfig("ppo")
    setup = WithDemonstrations(config, ranks)
    loss, gradient = setup.gradient(setup.prepared([setup.members]), [[3, 9], [0, 1, 2], [4], [5, 6, 7, 8]])

    bare = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    logprobs = padded_logprobs(bare, setup.batch)
    rewards = torch.tensor(setup.rewards, dtype=torch.float64).view(2, 5)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    total = torch.zeros((), dtype=torch.float64)
    for own, member, advantage in zip(
        logprobs.split([len(each) for each in setup.trajectories]), range(10), advantages.tolist(), strict=True
    ):
        taken = own[torch.from_numpy(setup.trajectories[member].loss_mask)].double()
        weighed = (taken - taken.detach()).exp()
        if member in (4, 9) and weight == "shaped":
            weighed = taken.exp() / (taken.exp() + 0.1)
        total = total - advantage * weighed.sum()
    expected = total / sum(setup.plan.sampled)
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for ours, theirs in zip(gradient, bare.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.grad, atol=1e-5, rtol=1e-4)
    assert max(float(each.abs().max()) for each in gradient) > 1e-3


def test_lags_of_trajectories_leave_demonstrations_out(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    setup = WithDemonstrations(with_group_demonstrations(make_config(model, tmp_path)), ranks)
    assert lag_counts(setup.batch.tokens, 0, 3).tolist() == [8, 0, 0, 0, 0]
    assert setup.batch.tokens.demonstrated is not None
    shown = replace(setup.batch.tokens.select(setup.batch.tokens.demonstrated.nonzero()[:, 0]))
    assert lag_counts(shown, 0, 3).tolist() == [0] * 5


def test_the_metrics_of_a_run_tell_played_and_shown_members_apart(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = with_group_demonstrations(make_config(model, tmp_path))
    run = Run(config).train(ranks)
    plan = run.replay.core.planned(0)
    rewards = [reward for _, reward in PlannedReplay(config).batch(0)]
    played = [reward for index, reward in enumerate(rewards) if index not in plan.demonstrations]
    (row, *_) = [values for step, values in run.metrics.rows if step == 0]
    assert (row["reward/mean"], row["demonstration/episodes"]) == (pytest.approx(sum(played) / 8), 2)
    assert row["outcome/mean"] == pytest.approx(sum(played) / 8)
    assert row["tokens_sampled"] + row["demonstration/tokens"] == sum(plan.sampled)
    assert row["trajectories_trained"] == 10
    assert row["lag/max"] == 0
    assert run.replay.core.audit()["trained_twice"] == 0


def test_kept_demonstrations_are_marked_and_have_their_weights(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = with_group_demonstrations(make_config(model, tmp_path))
    Run(config).train(ranks)
    kept = KeptEpisodes(tmp_path / "run")
    shown = [row for row in kept.rows() if "demonstration" in row.flags]
    assert {row.member for row in shown} == {4}
    assert {(row.finish, row.lag) for row in shown} == {("demonstration", -1)}
    assert all(row.lag >= 0 for row in kept.rows() if row.member < 4)
    episode = kept.read(shown[0].step, shown[0].id)
    mask = episode.trajectory.loss_mask
    probability = episode.proximal_logprobs[mask].astype(float)
    p = 2.718281828459045**probability
    assert episode.importance_weights[mask].tolist() == pytest.approx((p * 0.1 / (p + 0.1) ** 2).tolist(), rel=1e-4)
    assert set(episode.trajectory.versions[mask].tolist()) == {DEMONSTRATED}


@pytest.mark.parametrize(("event", "kept"), [("die_at", 2), ("stop_at", 3)])
def test_a_run_that_is_killed_trains_each_demonstration_as_often_as_one_that_is_not(
    event: str, kept: int, model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    def config(name: str) -> TrainConfig:
        return with_group_demonstrations(make_config(model, tmp_path / name, steps=6, minibatches=2, micro_tokens=48))

    whole = Run(config("whole")).train(ranks)
    Run(config("stopped"), **{event: 3}).until_stopped(ranks)
    resumed = Run(config("stopped")).train(ranks)
    assert_weights_equal(resumed.final, whole.final)
    assert list(resumed.metrics.of("demonstration/tokens")) == list(range(kept, 6))
    assert resumed.metrics.of("trajectories_trained")[5] == 60
