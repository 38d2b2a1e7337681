from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.algorithms.batch import Episodes, Totals
from asyncrl.algorithms.compose import Algorithm
from asyncrl.config.schema import TrainConfig
from asyncrl.learner.optimised import Optimised
from asyncrl.learner.packing import Passes
from asyncrl.learner.policy import load_policy
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.share import Share, build_episodes, build_share
from asyncrl.learner.trainer import LOSS, Minibatch, Trainer
from tests.learner.support import FakeReplay, make_config


def make_trainer(config: TrainConfig, ranks: Ranks) -> tuple[Trainer, Algorithm]:
    algorithm = Algorithm.from_config(config.algorithm)
    policy = load_policy(config.model, config.actor.temperature, ranks, 64)
    optimised = Optimised(policy, config.learner.lr, config.learner)
    return Trainer(ranks, algorithm, optimised, None, None, threading.Event()), algorithm


def make_batch(config: TrainConfig) -> tuple[Episodes, Share, Totals]:
    replay = FakeReplay(config)
    plan = replay.plan(0)
    assert plan is not None
    cpu = torch.device("cpu")
    share = build_share(range(len(plan.ids)), replay.fetch(plan.ids), cpu)
    return build_episodes(plan, replay.labels(plan.ids), cpu), share, Totals(sum(plan.sampled), len(plan.ids))


def whole(share: Share, totals: Totals) -> list[Minibatch]:
    return [Minibatch([sorted(share.lengths)], totals)]


def backward(trainer: Trainer, share: Share, passes: Passes, totals: Totals) -> tuple[float, list[Tensor]]:
    """The loss and the gradients of these passes; the gradients are taken away."""
    loss = 0.0
    for members in passes:
        rows = share.rows(members)
        sums = trainer._policy_pass(share, share.packed(members, rows), rows, totals)
        loss += sums[LOSS].item() if sums else 0.0
    gradients = [parameter.grad.full_tensor().clone() for parameter in trainer.policy.module.parameters()]
    trainer.policy.optimizer.zero_grad()
    return loss, gradients


def padded_logprobs(model: torch.nn.Module, share: Share, temperature: float) -> Tensor:
    """Log-probs [N] from one padded, masked forward pass of the bare model, with a row for each branch."""
    rows = list(share.ids.split([length for branches in share.lengths.values() for length in branches]))
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attend = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    logits = model(input_ids=ids, attention_mask=attend.long()).logits / temperature
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.cat([torch.zeros(1), logprobs[i, : len(row) - 1]]) for i, row in enumerate(rows)])


def assert_close(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_loss_and_gradients_are_those_of_a_padded_reference(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path)
    config.actor.temperature = 0.8
    trainer, algorithm = make_trainer(config, ranks)
    episodes, share, totals = make_batch(config)
    prepared = trainer.prepare(share, episodes, whole(share, totals))
    loss, gradients = backward(trainer, prepared, [[3], [0, 1, 2], [4, 6, 7], [5]], totals)

    bare = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    tokens = replace(share.tokens, proximal=padded_logprobs(bare, share, 0.8).detach())
    tokens = algorithm.prepare(episodes, tokens, lambda values: values)
    expected, _ = algorithm.loss(padded_logprobs(bare, share, 0.8), tokens, totals)
    expected.backward()
    assert {len(branches) for branches in share.lengths.values()} == {1, 2}
    assert abs(loss - expected.item()) < 1e-6
    assert_close(gradients, [parameter.grad for parameter in bare.parameters()])
    assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-3


def test_an_empty_pass_contributes_exactly_nothing(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path)
    trainer, _ = make_trainer(config, ranks)
    episodes, share, totals = make_batch(config)
    prepared = trainer.prepare(share, episodes, whole(share, totals))
    members = sorted(share.lengths)
    _, alone = backward(trainer, prepared, [members], totals)
    _, accompanied = backward(trainer, prepared, [[], members, []], totals)
    assert all(torch.equal(a, b) for a, b in zip(alone, accompanied, strict=True))


def test_proximal_log_probs_do_not_depend_on_the_passes(model: Path, ranks: Ranks, tmp_path: Path):
    config = make_config(model, tmp_path)
    trainer, _ = make_trainer(config, ranks)
    episodes, share, totals = make_batch(config)
    split = [Minibatch([[0, 5], [1], []], totals), Minibatch([[2, 3, 4], [6, 7]], totals)]
    together = trainer.prepare(share, episodes, whole(share, totals)).tokens.proximal
    apart = trainer.prepare(share, episodes, split).tokens.proximal
    torch.testing.assert_close(apart, together, atol=1e-5, rtol=0)
    assert (together[share.tokens.mask] < 0).all()
