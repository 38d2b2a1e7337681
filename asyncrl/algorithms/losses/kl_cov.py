from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.global_threshold import top
from asyncrl.algorithms.losses.base import Candidates, Loss, TokenLosses, Updates
from asyncrl.algorithms.parts import param


class KlCov(Loss):
    """The unclipped surrogate with a penalty on the tokens of the highest covariance, which keeps the entropy up.

    Formula: -r A + weight |log r| for the `share` of all policy tokens with the highest (log pi_prox - mean) (A -
    mean), and -r A for all other tokens; with both means over the batch
    Use: when the entropy collapses early; a penalty is smoother than the zero loss of clip_cov
    Source: The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, 2025
    Caveat: tokens are chosen once per step from the whole batch, not for each minibatch. There is no clip.
    """

    name = "kl_cov"
    selects = True

    share: float = param(2e-4, "share of all policy tokens that are penalised; at least one token is", "(0, 1]")
    weight: float = param(1.0, "weight of the penalty", "[0, inf)")

    def select(self, candidates: Candidates) -> Tensor:
        cov, count = candidates.covariance()
        return top(cov, max(1, int(self.share * count)), candidates.reduce)

    def __call__(self, updates: Updates) -> TokenLosses:
        assert updates.selected is not None
        log_ratio = updates.log_ratio
        penalty = torch.where(updates.selected, self.weight * log_ratio.abs(), 0.0)
        return TokenLosses(-log_ratio.exp() * updates.advantages + penalty, {"covariance": updates.selected})
