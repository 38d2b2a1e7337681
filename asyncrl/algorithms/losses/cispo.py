from __future__ import annotations

from asyncrl.algorithms.losses.base import ClippedLoss, TokenLosses, Updates
from asyncrl.algorithms.parts import param


class Cispo(ClippedLoss):
    """Clipped importance-sampling policy optimisation: the clipped ratio is only a weight, so that every token keeps
    its gradient.

    Formula: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi_theta
    Use: to keep the gradient of rare but decisive tokens, such as "however" or "wait", which ppo would clip
    Source: MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention, 2025
    Caveat: there is no trust region. As in the paper, there is no lower bound by default (clip_low=1).
    """

    name = "cispo"

    clip_low: float = param(1.0, "the weight is at least 1 - clip_low", "[0, 1]")
    clip_high: float = param(1.0, "the weight is at most 1 + clip_high", "[0, inf]")

    def __call__(self, updates: Updates) -> TokenLosses:
        ratio = updates.ratio().detach()
        marks = {"high": ratio > 1 + self.clip_high, "low": ratio < 1 - self.clip_low}
        return TokenLosses(-self.clip(ratio) * updates.advantages * updates.logprobs, marks)
