from __future__ import annotations

import torch

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates
from asyncrl.algorithms.parts import param


class Gmpo(Loss):
    """Geometric-mean policy optimisation: one ratio per sequence, the geometric mean of its tokens' clipped ratios.

    Formula: -exp(mean of l) (mean of A) for every token, both means over its sequence; with l = min(log r, clip_high)
    where A > 0, else max(log r, -clip_low)
    Use: when a loss with one ratio per sequence should not be dominated by a few outlying tokens; choose aggregation
    seq-mean-token-mean
    Source: Geometric-Mean Policy Optimization, 2025
    Caveat: the bounds are on log r, not on r. The advantages of tokens are averaged over the sequence. Corrections must
    have level sequence or geometric.
    """

    name = "gmpo"
    sequence_level = True

    clip_low: float = param(0.4, "log r is at least -clip_low if A <= 0", "[0, inf]")
    clip_high: float = param(0.4, "log r is at most clip_high if A > 0", "[0, inf]")

    def __call__(self, updates: Updates) -> TokenLosses:
        spans, log_ratio, advantages = updates.view.sequences, updates.log_ratio, updates.advantages
        bounded = torch.where(advantages > 0, log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low))
        losses = -spans.mean(bounded).exp() * spans.mean(advantages)
        marks = {
            "high": (log_ratio.detach() > self.clip_high) & (advantages > 0),
            "low": (log_ratio.detach() < -self.clip_low) & (advantages < 0),
        }
        return TokenLosses(spans.spread(losses.to(log_ratio.dtype)), marks)
