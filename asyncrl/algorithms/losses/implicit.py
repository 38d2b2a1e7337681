"""The loss that trains an implicit process model on outcomes, for the advantage `prime`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncrl.algorithms.batch import Tokens, Totals
from asyncrl.algorithms.view import View


def implicit_loss(log_ratio: Tensor, outcome: Tensor, tokens: Tokens, totals: Totals, beta: float) -> Tensor:
    """Cross-entropy of sigmoid(beta sum_t log(pi_phi / pi_ref)) against the outcome, a mean over the global sequences.

    log_ratio float[N] with gradient; outcome float[S] in [0, 1], of the global batch. Added over micro-batches and
    ranks it is the global loss; its gradient trains pi_phi. Source: Process Reinforcement through Implicit Rewards,
    2025.
    """
    view = View.of(tokens)
    present = view.sequences.lengths > 0
    logits = beta * view.sequences.sum(view.take(log_ratio))[present]
    target = outcome[view.owner][present].to(logits.dtype)
    losses: Tensor = binary_cross_entropy_with_logits(logits, target, reduction="none")
    total = losses.sum() / max(1, totals.sequences)
    return total.to(torch.promote_types(log_ratio.dtype, torch.float32))
