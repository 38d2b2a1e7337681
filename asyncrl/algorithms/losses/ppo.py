from __future__ import annotations

from asyncrl.algorithms.losses.base import DualClippedLoss, TokenLosses, Updates


class Ppo(DualClippedLoss):
    """The clipped surrogate of PPO, decoupled: the trust region is around the proximal policy, and the correction's w
    accounts for the behaviour policy.

    Formula: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and at most -dual_clip A where A < 0; with
    r = pi_theta / pi_prox
    Use: by default; a clip_high above clip_low keeps exploration (clip-higher)
    Source: Proximal Policy Optimization Algorithms, 2017; Batch size-invariance for policy optimization, 2022
    (decoupled); DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025 (clip-higher); Mastering Complex
    Control in MOBA Games with Deep Reinforcement Learning, 2020 (dual clip)
    Caveat: without dual_clip, the loss has no bound where A < 0 and the ratio is large.
    """

    name = "ppo"

    def __call__(self, updates: Updates) -> TokenLosses:
        return self.bounded(updates.ratio(), updates.advantages)
