from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Reduce
from asyncrl.algorithms.global_threshold import quantile
from asyncrl.algorithms.log_ratios import clamp_log
from asyncrl.algorithms.losses.base import Candidates, ClippedLoss, TokenLosses, Updates, surrogate
from asyncrl.algorithms.parts import param
from asyncrl.algorithms.policy_tokens import PolicyTokens


class Sat(ClippedLoss):
    """PPO with a staleness-adaptive trust region: the clip is narrower for the tokens whose probability has changed
    most since they were sampled, on the side of the change.

    Formula: -min(r A, clip(r, 1 - clip_low c_low, 1 + clip_high c_high) A), with r = pi_theta / mu. c_high = 1 / (1 +
    (d / q)^2) where d > q, else 1. c_low = 1 / (1 + (d / q)^2) where d < -q, else 1. d = log pi_prox - log mu, and q is
    the quantile `quantile` of |d| over all policy tokens. Both factors are 1 if q = 0
    Use: for old data: PPO's clip treats all tokens alike, and the few that have moved far make training unstable
    Source: Stale but Stable: Staleness-Adaptive Trust Regions for Stabilizing Asynchronous Reinforcement Learning, 2026
    (equations 3.1 to 3.6)
    Caveat: the paper computes d and q in every micro-batch. Here both are fixed at the start of the step and q is over
    the whole batch, so that the loss does not depend on the micro-batches. pi_theta / mu is the whole ratio, so no
    correction may set weights.
    """

    name = "sat"
    corrects = True
    selects = True
    uses_ratio = True

    quantile: float = param(0.9, "smallest share of the policy tokens that keep the whole clip", "(0, 1)")

    def select(self, candidates: Candidates) -> Tensor:
        moved = self.log_ratio(candidates.proximal - candidates.behaviour, candidates.view)
        return contraction(moved.abs(), self.quantile, candidates.reduce)

    def log_ratio(self, log_ratio: Tensor, view: PolicyTokens) -> Tensor:
        """float[M]: for each token the log-ratio that the clip compares, computed from the tokens' own log-ratios."""
        return clamp_log(log_ratio)

    def __call__(self, updates: Updates) -> TokenLosses:
        assert updates.selected is not None
        factor, advantages = updates.selected, updates.advantages
        moved = self.log_ratio(updates.proximal - updates.behaviour, updates.view)
        ratio = self.log_ratio(updates.logprobs - updates.behaviour, updates.view).exp()
        low = 1 - self.clip_low * torch.where(moved < 0, factor, 1.0)
        high = 1 + self.clip_high * torch.where(moved > 0, factor, 1.0)
        marks = {
            "high": (ratio.detach() > high) & (advantages > 0),
            "low": (ratio.detach() < low) & (advantages < 0),
            "stale": factor < 1,
        }
        return TokenLosses(surrogate(ratio, ratio.clamp(low, high), advantages), marks)


class SatGspo(Sat):
    """The staleness-adaptive trust region with one ratio per sequence, the geometric mean of its tokens' ratios.

    Formula: as sat, but r and pi_prox / mu are exp of the mean of the tokens' log-ratios over the sequence; each
    sequence counts in q once for each of its tokens, and the gradient of r is r times the gradient of the token's
    log pi_theta
    Use: as gspo, for old data; choose aggregation seq-mean-token-mean
    Source: Stale but Stable: Staleness-Adaptive Trust Regions for Stabilizing Asynchronous Reinforcement Learning, 2026
    (SAT-GSPO); Group Sequence Policy Optimization, 2025
    Caveat: the default bounds are those of gspo; the paper's are 0.2. Corrections must have level sequence or
    geometric.
    """

    name = "sat_gspo"
    sequence_level = True

    clip_low: float = param(3e-4, "the sequence's ratio is clipped to at least 1 - clip_low", "[0, 1]")
    clip_high: float = param(4e-4, "the sequence's ratio is clipped to at most 1 + clip_high", "[0, inf]")

    def log_ratio(self, log_ratio: Tensor, view: PolicyTokens) -> Tensor:
        own, spans = clamp_log(log_ratio), view.sequences
        return spans.spread(spans.mean(own.detach()).to(own.dtype)) + own - own.detach()


def contraction(moved: Tensor, share: float, reduce: Reduce) -> Tensor:
    """float[M]: the share of its clip radius that each token keeps. It is 1 up to the quantile q of `moved` float[M]
    over all ranks, and 1 / (1 + (moved / q)^2) beyond."""
    # Both sides of the comparison are float32, so that no token lies beyond a quantile that is its own value.
    q = quantile(moved, share, reduce)
    narrowed = 1 / (1 + (moved / q).square()) if q else torch.ones_like(moved)
    return torch.where(moved.float() > q, narrowed, 1.0)
