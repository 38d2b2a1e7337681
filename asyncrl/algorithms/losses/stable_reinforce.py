from __future__ import annotations

import math

from asyncrl.algorithms.losses.base import ClippedLoss, TokenLosses, Updates, surrogate
from asyncrl.algorithms.parts import param


class StableReinforce(ClippedLoss):
    """The clipped surrogate of PPO with a bound on the ratio itself: a token whose ratio is beyond it has no gradient,
    also where A < 0.

    Formula: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), with s = exp(clip(log r, -log bound, log bound)) and
    r = pi_theta / pi_prox
    Use: as ppo, if a few tokens with A < 0 and huge ratios make training unstable; with advantage reinforce_pp and
    correction outliers it is StableReinforce
    Source: R1-Reward: Training Multimodal Reward Model Through Stable Reinforcement Learning, 2025 (pre-clip)
    Caveat: the paper's third part, a judge that rewards consistent reasoning, is a matter of the reward. Tinker has
    another loss of the same name, whose formula is not public.
    """

    name = "stable_reinforce"

    bound: float = param(1e3, "largest ratio, and the inverse of the smallest one", "(1, 1e8]")

    def __call__(self, updates: Updates) -> TokenLosses:
        limit = math.log(self.bound)
        ratio, advantages = updates.log_ratio.clamp(-limit, limit).exp(), updates.advantages
        marks = self.marks(ratio.detach(), advantages) | {"bound": updates.log_ratio.detach().abs() > limit}
        return TokenLosses(surrogate(ratio, self.clip(ratio), advantages), marks)
