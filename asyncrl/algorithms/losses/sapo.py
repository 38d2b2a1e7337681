from __future__ import annotations

import torch

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates
from asyncrl.algorithms.parts import param


class Sapo(Loss):
    """Soft adaptive policy optimisation: a smooth gate instead of a clip. The gradient fades as the ratio leaves 1.

    Formula: -(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0 else tau_neg
    Use: instead of ppo where the edge of the clip causes instability
    Source: Soft Adaptive Policy Optimization, 2025
    Caveat: at r = 1 only the gradient is that of -r A; the value is -2 A / tau.
    """

    name = "sapo"

    tau_pos: float = param(1.0, "sharpness where A > 0", "(0, inf)")
    tau_neg: float = param(1.05, "sharpness where A <= 0", "(0, inf)")

    def __call__(self, updates: Updates) -> TokenLosses:
        advantages = updates.advantages
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg).to(advantages.dtype)
        gate = (tau * (updates.ratio() - 1)).sigmoid()
        return TokenLosses(-4 / tau * gate * advantages)
