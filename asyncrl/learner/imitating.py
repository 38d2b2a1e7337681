"""Imitation learning: the gradient of the demonstrations' mean negative log-likelihood, and the metrics."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from asyncrl.learner.batch.minibatch import ImitationBatch
from asyncrl.learner.batch.packing import ForwardPass
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.step_result import LOSS, Sums, add_gradient, add_sums

NLL = "sft/nll"
"""The name of a sum: the negative log-likelihood of all tokens of demonstrations."""
IMITATION_TEMPERATURE = 1.0
"""Demonstrations are learned at temperature 1: no policy sampled them at another temperature."""


def add_imitation_gradient(
    policy: Trainable[Policy], passes: Iterator[ForwardPass], imitation: ImitationBatch, update: int, sums: Sums
) -> Sums:
    """Add the gradient of one update's imitation loss to the policy's gradient. The loss is the weight times the mean
    negative log-likelihood of the demonstrations over the tokens of all ranks. Adds the loss to `sums`. Returns how
    much the policy's experts were used (see model/router_balance.py), if it is a mixture of experts."""
    loads = Sums()
    count, tokens = len(imitation.passes[update]), imitation.tokens[update]
    for number, each in enumerate(passes, 1):
        policy.begin_pass(is_last=number == count)
        logprobs, _ = policy.module(each.packed, temperature=IMITATION_TEMPERATURE)

        def loss(logprobs: Tensor = logprobs) -> tuple[Tensor, Sums]:
            # Tokens that are not learned have log-probs of 0.
            total = -logprobs.sum()
            weighed = imitation.weight / tokens * total
            return weighed, {NLL: total, LOSS: weighed}

        add_sums(sums, add_gradient(policy, logprobs, each.rows, loss))
        add_sums(loads, policy.module.loads.sums())
    return loads


@torch.no_grad()
def imitation_nll(policy: Policy, passes: Iterator[ForwardPass]) -> Sums:
    """Compute the negative log-likelihood of all demonstrations in `passes` together."""
    sums = Sums()
    for each in passes:
        logprobs = policy(each.packed, temperature=IMITATION_TEMPERATURE)[0]
        add_sums(sums, {NLL: -logprobs.double().sum()} if len(each.rows) else {})
    return sums


def imitation_summary(total: dict[str, Tensor], imitation: ImitationBatch) -> dict[str, float]:
    """Return the metrics of the demonstrations. Removes the sum of their negative log-likelihood from `total`,
    which has the sums over all ranks."""
    tokens = sum(imitation.tokens)
    return {"sft/loss": float(total.pop(NLL)) / tokens, "sft/tokens": float(tokens), "sft/weight": imitation.weight}
