from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.parts import param

ROUNDING = 1e-9
"""Differences of advantages below this relative size count as 0. Rounding would otherwise decide about a token whose
distance is exactly the limit, or drop equal advantages."""


class Outliers(Correction):
    """Drops the tokens whose advantage lies far from the mean of the batch.

    Formula: drop a token if |A - m| > sigmas s, with m the mean and s the standard deviation of A over all policy
    tokens of the batch. Equal advantages are all kept
    Use: with whitened advantages, where a batch of nearly equal rewards gives a few tokens huge advantages
    Source: R1-Reward: Training Multimodal Reward Model Through Stable Reinforcement Learning, 2025 (the filter of
    advantages in StableReinforce)
    Caveat: rare successes are such outliers, too: a policy that solves one episode in twenty would not learn from it.
    """

    name = "outliers"
    whole_batch = True
    by_advantage = True
    uses_ratio = False

    sigmas: float = param(3.0, "largest distance from the mean that is kept, in standard deviations", "[1, inf)")
    # With a smaller limit, a batch with as many advantages of 1 as of -1 would lose every token.

    def keep(self, ages: Ages) -> Tensor:
        assert ages.reduce is not None
        values = ages.advantages.double()
        total, count = ages.reduce(torch.stack([values.sum(), values.new_tensor(values.numel())]))
        mean = total / count.clamp(min=1)
        squares = (values - mean).square()
        variance = ages.reduce(squares.sum()) / count.clamp(min=1)
        kept: Tensor = squares <= self.sigmas**2 * variance * (1 + ROUNDING) + (mean * ROUNDING).square()
        return kept
