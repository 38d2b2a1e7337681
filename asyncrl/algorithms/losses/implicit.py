"""The loss that trains an implicit process model, for the advantage `prime`. Such a model pi_phi learns only from
outcomes, and its log(pi_phi / pi_ref) of a token is the token's reward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from asyncrl.algorithms.batch import Episodes, Tokens, Totals
from asyncrl.algorithms.old_tokens import only_trained
from asyncrl.algorithms.policy_tokens import PolicyTokens


def implicit_loss(
    log_ratio: Tensor, outcome: Tensor, tokens: Tokens, totals: Totals, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The cross-entropy of sigmoid(score) against the outcome, and additive sums for `implicit_summary`.

    The score of a sequence is beta sum_t log(pi_phi / pi_ref). The sums contain the scores of the pass as float64[S].
    The losses of all micro-batches and ranks add up to the mean over the sequences of the global minibatch. The
    gradient trains pi_phi. log_ratio float[N] has a gradient. `outcome` float[S] is for all sequences of
    the global batch, and is clamped to [0, 1].
    Source: Process Reinforcement through Implicit Rewards, 2025.
    """
    view = PolicyTokens.of(tokens)
    # An outcome judges a whole episode, so the score includes old tokens, too. `totals` does not count episodes that
    # have only old tokens.
    present = PolicyTokens.of(only_trained(tokens)).sequences.lengths > 0
    logits = beta * view.sequences.sum(view.take(log_ratio))
    target = outcome[view.owner].to(logits.dtype).clamp(0, 1)
    losses = torch.where(present, binary_cross_entropy_with_logits(logits, target, reduction="none"), 0.0)
    total = losses.sum() / max(1, totals.sequences)
    sums = {
        "implicit/loss": losses.detach().sum(),
        "implicit/right": (present & ((logits > 0) == (target > 0.5))).sum(),
        "implicit/sequences": present.sum(),
        "implicit/scores": outcome.new_zeros(outcome.shape, dtype=torch.float64).index_copy_(
            0, view.owner, logits.detach().double()
        ),
    }
    return total.to(torch.promote_types(log_ratio.dtype, torch.float32)), sums


def implicit_summary(sums: Mapping[str, Tensor], episodes: Episodes | None = None) -> dict[str, float]:
    """The step's loss of pi_phi, and the share of outcomes that it predicted rightly; empty if pi_phi is not trained.

    If `episodes` is given, the result also has the share of pairs that pi_phi ranks correctly.
    """
    count = float(sums.get("implicit/sequences", torch.zeros(())))
    if not count:
        return {}
    values = {
        "implicit/loss": float(sums["implicit/loss"]) / count,
        "implicit/accuracy": float(sums["implicit/right"]) / count,
    }
    if episodes is not None:
        outcome, group = episodes.outcome.cpu(), episodes.group.cpu()
        values["implicit/pairwise_accuracy"] = pairwise_accuracy(sums["implicit/scores"].cpu(), outcome, group)
    return values


def pairwise_accuracy(scores: Tensor, outcome: Tensor, group: Tensor) -> float:
    """The share of pairs in a group whose scores float[S] are in the same order as their outcomes float[S].

    It is a mean over the groups. `group` int64[S] has the index of each sequence's group. The weight of a pair is the
    difference of its outcomes. Equal scores count as half right. A group of equal outcomes counts as 0.5.
    Source: Process Reinforcement through Implicit Rewards, 2025 (compute_dpo_accuracy of its code, where equal scores
    are right or wrong by the order of the batch).
    """
    shares = []
    for members in group.argsort(stable=True).split(group.bincount().tolist()):
        apart = outcome[members, None].double() - outcome[members]
        order = (scores[members, None] - scores[members]).sign()
        total = apart.abs().sum()
        shares.append(0.5 + 0.5 * float((order * apart).sum() / total) if total else 0.5)
    return sum(shares) / len(shares)
