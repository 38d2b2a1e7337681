from __future__ import annotations

import torch

from asyncrl.algorithms.losses.base import ClippedLoss, TokenLosses, Updates, surrogate
from asyncrl.algorithms.parts import param


class Ppo(ClippedLoss):
    """The clipped surrogate of PPO, decoupled: the trust region is around the proximal policy, and the correction's w
    accounts for the behaviour policy.

    Formula: -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi_theta / pi_prox; where A < 0 at most -dual_clip
    A
    Use: the default; clip_high above clip_low keeps exploring (clip-higher)
    Source: Proximal Policy Optimization Algorithms, 2017; Batch size-invariance for policy optimization, 2022
    (decoupled); DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025 (clip-higher); Mastering Complex
    Control in MOBA Games with Deep Reinforcement Learning, 2020 (dual clip)
    Caveat: without dual_clip the loss of a token with A < 0 and a large ratio is unbounded.
    """

    name = "ppo"

    dual_clip: float | None = param(None, "bound on r where A < 0", "(1, inf]")

    def __call__(self, updates: Updates) -> TokenLosses:
        ratio, advantages = updates.ratio(), updates.advantages
        losses = surrogate(ratio, self.clip(ratio), advantages)
        marks = self.marks(ratio.detach(), advantages)
        if self.dual_clip is not None:
            bound = torch.where(advantages < 0, -self.dual_clip * advantages, torch.inf)
            marks["dual"] = losses.detach() > bound
            losses = torch.minimum(losses, bound)
        return TokenLosses(losses, marks)
