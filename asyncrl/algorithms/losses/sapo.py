"""Soft adaptive policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates
from asyncrl.algorithms.parts import param


@dataclass(frozen=True, kw_only=True)
class Sapo(Loss):
    """A smooth gate in place of a clip: the gradient fades as the ratio leaves 1.

    Formula: -(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0 else tau_neg
    Use: instead of ppo where the clip's edge is a source of instability
    Source: Soft Adaptive Policy Optimization, 2025
    Caveat: the value is offset: at r = 1 it is -2 A / tau, and only the gradient is that of -r A.
    """

    name: ClassVar[str] = "sapo"

    tau_pos: float = param(1.0, "sharpness where A > 0", "(0, inf)")
    tau_neg: float = param(1.05, "sharpness where A <= 0", "(0, inf)")

    def __call__(self, updates: Updates) -> TokenLosses:
        advantages = updates.advantages
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg).to(advantages.dtype)
        gate = (tau * (updates.ratio() - 1)).sigmoid()
        return TokenLosses(-4 / tau * gate * advantages)
