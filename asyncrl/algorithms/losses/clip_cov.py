from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.global_threshold import top
from asyncrl.algorithms.losses.base import Candidates, TokenLosses, Updates
from asyncrl.algorithms.losses.ppo import Ppo
from asyncrl.algorithms.parts import param
from asyncrl.errors import ConfigError


class ClipCov(Ppo):
    """PPO without the gradient of a few random tokens of high covariance, which keeps the entropy up.

    Formula: 0 for the chosen tokens, else the loss of ppo. At most `share` of all policy tokens are chosen, at random
    among those with cov_low < (log pi_prox - mean) (A - mean) < cov_high; with both means over the batch
    Use: when the entropy collapses early
    Source: The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, 2025
    Caveat: tokens are chosen once per step from the whole batch, not for each minibatch. The random draw depends only
    on version, sequence and position.
    """

    name = "clip_cov"
    selects = True

    share: float = param(
        2e-4,
        "largest share of all policy tokens that lose their gradient; a share below one token still allows one",
        "(0, 1]",
    )
    cov_low: float = param(1.0, "a token may be chosen if its covariance is above this", "(-inf, inf)")
    cov_high: float = param(5.0, "a token may be chosen if its covariance is below this", "(-inf, inf]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cov_low >= self.cov_high:
            raise ConfigError(f"{self.setting('cov_low')}: it must be below cov_high={self.cov_high}")

    def select(self, candidates: Candidates) -> Tensor:
        cov, count = candidates.covariance()
        high = (cov > self.cov_low) & (cov < self.cov_high)
        drawn = top(torch.where(high, candidates.draw, -1.0), max(1, int(self.share * count)), candidates.reduce)
        return high & drawn

    def __call__(self, updates: Updates) -> TokenLosses:
        assert updates.selected is not None
        result = super().__call__(updates)
        losses = torch.where(updates.selected, 0.0, result.losses)
        return TokenLosses(losses, {**result.marks, "covariance": updates.selected})
