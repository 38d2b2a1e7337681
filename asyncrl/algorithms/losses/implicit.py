"""The loss that trains an implicit process model on outcomes, for the advantage `prime`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncrl.algorithms.batch import Tokens, Totals
from asyncrl.algorithms.view import View


def implicit_loss(
    log_ratio: Tensor, outcome: Tensor, tokens: Tokens, totals: Totals, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of sigmoid(beta sum_t log(pi_phi / pi_ref)) against the outcome, a mean over the global sequences;
    and additive sums for `implicit_summary`.

    log_ratio float[N] with gradient; outcome float[S] of the global batch, of which what lies outside of [0, 1] counts
    as the nearer end. Added over micro-batches and ranks it is the global loss; its gradient trains pi_phi. Source:
    Process Reinforcement through Implicit Rewards, 2025.
    """
    view = View.of(tokens)
    present = view.sequences.lengths > 0
    logits = beta * view.sequences.sum(view.take(log_ratio))
    target = outcome[view.owner].to(logits.dtype).clamp(0, 1)
    losses = torch.where(present, binary_cross_entropy_with_logits(logits, target, reduction="none"), 0.0)
    total = losses.sum() / max(1, totals.sequences)
    sums = {
        "implicit/loss": losses.detach().sum(),
        "implicit/right": (present & ((logits > 0) == (target > 0.5))).sum(),
        "implicit/sequences": present.sum(),
    }
    return total.to(torch.promote_types(log_ratio.dtype, torch.float32)), sums


def implicit_summary(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The step's loss of pi_phi, and the share of outcomes that it predicted; empty without one."""
    count = float(sums.get("implicit/sequences", torch.zeros(())))
    if not count:
        return {}
    return {
        "implicit/loss": float(sums["implicit/loss"]) / count,
        "implicit/accuracy": float(sums["implicit/right"]) / count,
    }
