from __future__ import annotations

from asyncrl.algorithms.losses.base import DualClippedLoss, TokenLosses, Updates
from asyncrl.algorithms.parts import param


class Gspo(DualClippedLoss):
    """Group sequence policy optimisation: one ratio per sequence, the geometric mean of its tokens' ratios, which is
    clipped.

    Formula: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) for every token, and at most -dual_clip A where A < 0;
    with s = exp(mean of log r over the sequence), and the gradient of s equal to s times the gradient of the token's
    log pi_theta
    Use: for mixture-of-experts models and for long sequences, where the ratios of single tokens are noise; choose
    aggregation seq-mean-token-mean
    Source: Group Sequence Policy Optimization, 2025; with aggregation seq-mean-token-sum, it is LUSPO (preset luspo):
    Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length Variation in RLVR, 2026
    Caveat: the ratios of sequences are close to 1, so the bounds are hundreds of times narrower than in ppo.
    Corrections must have level sequence or geometric.
    """

    name = "gspo"
    sequence_level = True

    clip_low: float = param(3e-4, "the sequence's ratio is clipped to at least 1 - clip_low", "[0, 1]")
    clip_high: float = param(4e-4, "the sequence's ratio is clipped to at most 1 + clip_high", "[0, inf]")

    def __call__(self, updates: Updates) -> TokenLosses:
        spans, log_ratio = updates.view.sequences, updates.log_ratio
        mean = spans.mean(log_ratio.detach()).to(log_ratio.dtype)
        ratio = (spans.spread(mean) + log_ratio - log_ratio.detach()).exp()
        return self.bounded(ratio, updates.advantages)
