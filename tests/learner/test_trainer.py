from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.batch import Episodes, Totals
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.config.schema import PartConfig, TrainConfig
from asyncrl.learner.batch.local_batch import LocalBatch, build_episodes, build_local_batch
from asyncrl.learner.batch.minibatch import Minibatch
from asyncrl.learner.batch.prefixes import EVERY, Sharing
from asyncrl.learner.batch.schedule import Passes
from asyncrl.learner.model.optimizer import Trainable, UpdateResult
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.step_result import StepResult
from asyncrl.learner.trainer import Trainer
from asyncrl.types import BatchPlan, Labels, Trajectory
from tests.learner.support import PlannedReplay, make_config

pytestmark = pytest.mark.slow

TEMPERATURE = 0.8


class Recorded(Trainable[Policy]):
    """Keeps its gradient and does not move. From here on the host may wait for a GPU."""

    gradient: list[Tensor]
    scale: float

    def update(self, step: int, scale: float = 1.0) -> UpdateResult:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        self.scale = scale
        self.gradient = [parameter.grad.full_tensor().clone() for parameter in self.module.parameters()]
        self.module.zero_grad()
        return UpdateResult(1.0)


class Setup:
    """A trainer whose policy stays, and a batch."""

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        config.actor.temperature = TEMPERATURE
        config.algorithm.proximal = "recompute"
        self.algorithm = Algorithm.from_config(config.algorithm)
        self.policy = Recorded(load_policy(config.model, TEMPERATURE, ranks, 64), config.learner.lr, config.learner)
        self.trainer = Trainer(ranks, self.algorithm, self.policy, None, None, threading.Event())
        trajectories, rewards = zip(*PlannedReplay(config).batch(0), strict=True)
        self.members = list(range(len(trajectories)))
        plan = BatchPlan(
            step=0,
            version=0,
            ids=[f"{member}" for member in self.members],
            group_ids=[f"{member // config.learner.group_size}" for member in self.members],
            tokens=[len(each) for each in trajectories],
            sampled=[int(each.loss_mask.sum()) for each in trajectories],
            weights=[1.0 for _ in self.members],
        )
        labels = [Labels(name, reward, 0.0, "scorer") for name, reward in zip(plan.ids, rewards, strict=True)]
        totals = Totals.of(plan.sampled, plan.group_ids, range(len(plan.ids)))
        assert totals.group_tokens is not None
        self.totals = replace(totals, group_tokens=totals.group_tokens.to(ranks.device))
        self.episodes: Episodes = build_episodes(plan, labels, ranks.device)
        self.trajectories: Sequence[Trajectory] = trajectories
        self.batch: LocalBatch = build_local_batch(self.members, trajectories, ranks.device)

    def prepared(self, *passes: Passes) -> LocalBatch:
        return self.trainer.prepare(self.batch, self.episodes, [Minibatch(each, self.totals) for each in passes])

    def gradient(self, prepared: LocalBatch, passes: Passes) -> tuple[float, list[Tensor]]:
        """The loss and its gradient, with the batch split into these passes."""
        result = self.trainer.learn(0, prepared, self.episodes, [Minibatch(passes, self.totals)])
        return result.loss, self.policy.gradient


@pytest.fixture
def setup(model: Path, ranks: Ranks, tmp_path: Path) -> Setup:
    return Setup(make_config(model, tmp_path), ranks)


def padded_logprobs(model: torch.nn.Module, batch: LocalBatch) -> Tensor:
    """Log-probs [N] of the tokens from `padded`."""
    return padded(model, batch, lambda logs, targets: logs.gather(2, targets[..., None])[..., 0])


def padded(model: torch.nn.Module, batch: LocalBatch, statistic: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[N] from one padded, masked forward pass of the bare model, with a row for each branch: `statistic` gets the
    log-probs of the whole vocabulary before each token, and the tokens."""
    rows = list(
        batch.ids.to(batch.tokens.mask.device).split(
            [length for branches in batch.lengths.values() for length in branches]
        )
    )
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attend = torch.arange(ids.shape[1], device=ids.device) < ids.new_tensor([[len(row)] for row in rows])
    logits = model(input_ids=ids, attention_mask=attend.long()).logits / TEMPERATURE
    values = statistic(logits[:, :-1].log_softmax(-1), ids[:, 1:])
    return torch.cat([F.pad(values[i, : len(row) - 1], (1, 0)) for i, row in enumerate(rows)])


def test_loss_and_gradients_are_those_of_a_padded_reference(setup: Setup, model: Path):
    loss, gradient = setup.gradient(setup.prepared([setup.members]), [[3], [0, 1, 2], [4, 6, 7], [5]])

    bare = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").to(setup.batch.tokens.mask.device)
    tokens = replace(setup.batch.tokens, proximal=padded_logprobs(bare, setup.batch).detach())
    tokens = setup.algorithm.prepare(setup.episodes, tokens, lambda values: values)
    expected, _ = setup.algorithm.loss(padded_logprobs(bare, setup.batch), tokens, setup.totals)
    expected.backward()
    assert {len(branches) for branches in setup.batch.lengths.values()} == {1, 2}
    assert abs(loss - expected.item()) < 1e-6
    for ours, theirs in zip(gradient, bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, atol=1e-5, rtol=1e-5)
    assert max(float(each.abs().max()) for each in gradient) > 1e-3


def test_entropy_is_measured_over_a_sample_that_changes_no_bit_and_depends_on_no_split(setup: Setup):
    def learned(share: float, passes: Passes) -> tuple[StepResult, list[Tensor]]:
        setup.batch = replace(setup.batch, entropy_share=share)
        prepared = setup.prepared([setup.members])
        result = setup.trainer.learn(0, prepared, setup.episodes, [Minibatch(passes, setup.totals)])
        return result, setup.policy.gradient

    whole: Passes = [setup.members]
    (none, without), (sampled, gradient), (full, _) = (learned(share, whole) for share in (0.0, 0.3, 1.0))
    assert "entropy" not in none.summary
    assert all(map(torch.equal, gradient, without))
    assert 0 < full.summary["entropy"] <= math.log(setup.policy.module.vocabulary)
    assert sampled.summary["entropy"] == pytest.approx(full.summary["entropy"], rel=0.2)
    split, _ = learned(0.3, [[3], [0, 1, 2], [4, 6, 7], [5]])
    assert split.summary["entropy"] == pytest.approx(sampled.summary["entropy"], rel=1e-5)


def test_an_advantage_gets_the_sums_of_squared_probabilities_of_the_pass_before_the_update(
    model: Path, ranks: Ranks, tmp_path: Path
):
    config = make_config(model, tmp_path)
    config.algorithm.advantage = PartConfig("optimal_token_baseline")
    setup = Setup(config, ranks)
    tokens = setup.prepared([[3], [0, 1, 2], [4, 6, 7], [5]]).tokens
    bare = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").to(setup.batch.tokens.mask.device)
    expected = padded(bare, setup.batch, lambda logs, _: (2 * logs).exp().sum(-1)).detach()
    assert tokens.collisions is not None
    assert tokens.proximal is not None
    torch.testing.assert_close(tokens.collisions[tokens.mask], expected[tokens.mask], atol=1e-6, rtol=1e-5)
    logprobs = padded_logprobs(bare, setup.batch).detach()
    torch.testing.assert_close(tokens.proximal[tokens.mask], logprobs[tokens.mask], atol=1e-5, rtol=1e-5)


def test_streams_may_train_by_cross_entropy_alone(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path)
    config.algorithm.stream = [PartConfig("rl", {"weight": 0.0}), PartConfig("ce")]
    setup = Setup(config, ranks)
    loss, gradient = setup.gradient(setup.prepared([setup.members]), [[3], [0, 1, 2], [4, 6, 7], [], [5]])
    bare = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").to(setup.batch.tokens.mask.device)
    expected = -padded_logprobs(bare, setup.batch)[setup.batch.tokens.mask].mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for ours, theirs in zip(gradient, bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, atol=1e-5, rtol=1e-5)


def test_an_update_has_the_learning_rate_of_its_own_minibatch(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path)
    config.algorithm.lr_scale = PartConfig("ess")
    setup = Setup(config, ranks)
    prepared = setup.prepared([setup.members])
    view, tokens = PolicyTokens.of(prepared.tokens), prepared.tokens
    assert tokens.proximal is not None
    moved = view.sequences.sum(view.take(tokens.proximal - tokens.behaviour)).tolist()

    def expected(members: list[int]) -> float:
        weights = [math.exp(moved[member]) for member in members]
        return sum(weights) / math.sqrt(len(members) * sum(each**2 for each in weights))

    halves = [[0, 1, 2], [3, 4, 5, 6, 7]]
    minibatches = [Minibatch([[member] for member in half], setup.totals) for half in halves]
    result = setup.trainer.learn(0, prepared, setup.episodes, minibatches)
    assert max(moved) - min(moved) > 1
    assert result.lr_scales == pytest.approx([expected(half) for half in halves], rel=1e-4)
    assert setup.policy.scale == result.lr_scales[1] < 1
    assert result.summary["lr_scale"] == pytest.approx(sum(result.lr_scales) / 2)
    setup.trainer.algorithm = setup.algorithm = Algorithm.from_config(make_config(model, tmp_path).algorithm)
    assert "lr_scale" not in setup.trainer.learn(0, prepared, setup.episodes, minibatches).summary
    assert setup.policy.scale == 1


def test_an_empty_pass_contributes_exactly_nothing(setup: Setup):
    prepared = setup.prepared([setup.members])
    _, alone = setup.gradient(prepared, [setup.members])
    _, accompanied = setup.gradient(prepared, [[], setup.members, []])
    assert all(torch.equal(a, b) for a, b in zip(alone, accompanied, strict=True))


@pytest.mark.heavy
@pytest.mark.parametrize("shares", [None, EVERY])
def test_compiled_layers_and_padded_passes_change_nothing(
    setup: Setup, model: Path, ranks: Ranks, tmp_path: Path, shares: Sharing | None
):
    config = make_config(model, tmp_path)
    config.model.compile = True
    compiled = Setup(config, ranks)
    assert compiled.policy.module.pads_passes
    passes = [[3], [0, 1, 2], [4, 6, 7], [], [5]]
    loss, gradient = setup.gradient(setup.prepared([setup.members]), passes)
    batch = replace(compiled.prepared([setup.members]), sharing=shares)
    sizes = [len(batch.forward_pass(members).padded().packed.ids) for members in passes]
    assert all(size % 16 == 0 for size in sizes)
    padded_loss, padded_gradient = compiled.gradient(batch, passes)
    assert padded_loss == pytest.approx(loss, abs=1e-6)
    for ours, theirs in zip(padded_gradient, gradient, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_proximal_log_probs_do_not_depend_on_the_passes(setup: Setup):
    together = setup.prepared([setup.members]).tokens.proximal
    apart = setup.prepared([[0, 5], [1], []], [[2, 3, 4], [6, 7]]).tokens.proximal
    torch.testing.assert_close(apart, together, atol=1e-5, rtol=0)
    assert (together[setup.batch.tokens.mask] < 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the host waits for GPUs only")
@pytest.mark.parametrize("sharing", [None, EVERY])
def test_the_host_does_not_wait_for_the_gpu_in_passes(
    model: Path, ranks: Ranks, tmp_path: Path, sharing: Sharing | None
):
    config = make_config(model, tmp_path)
    config.model.dtype = "bfloat16"
    config.algorithm.entropy_weight = 0.01
    setup = Setup(config, ranks)
    prepared = replace(setup.prepared([setup.members]), sharing=sharing)
    passes = [[3], [0, 1, 2], [4, 6, 7], [5], []]
    setup.gradient(prepared, passes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        setup.gradient(prepared, passes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
