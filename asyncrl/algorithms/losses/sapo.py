from __future__ import annotations

import math

import torch

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates, dual_clipped
from asyncrl.algorithms.parts import param
from asyncrl.errors import ConfigError


class Sapo(Loss):
    """Soft adaptive policy optimisation: a smooth gate instead of a clip. The gradient fades as the ratio moves away
    from 1.

    Formula: -(4 / tau) sigmoid(tau (r - 1)) A, and at most -dual_clip A where A < 0; with tau = tau_pos where A > 0,
    else tau_neg
    Use: instead of ppo if the edge of the clip causes instability
    Source: Soft Adaptive Policy Optimization, 2025
    Caveat: at r = 1, the gradient equals the gradient of -r A, but the value is -2 A / tau.
    """

    name = "sapo"

    tau_pos: float = param(
        1.0, "tau where A > 0: the larger, the faster the gradient fades as r moves away from 1", "(0, inf)"
    )
    tau_neg: float = param(1.05, "tau where A <= 0", "(0, inf)")
    dual_clip: float | None = param(None, "bound on the loss where A < 0, in units of -A; null: no bound", "(1, inf]")

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 2 / self.tau_neg
        if self.dual_clip is not None and self.dual_clip <= least:
            raise ConfigError(
                f"{self.setting('dual_clip')}: it must be above 2 / tau_neg = {least:.4g}, the loss at a ratio of 1; "
                "otherwise no token with A < 0 has a gradient"
            )

        if self.dual_clip is not None and 2 * least <= self.dual_clip < math.inf:
            raise ConfigError(
                f"{self.setting('dual_clip')}: the loss never reaches this bound, since it stays below 4 / tau_neg = "
                f"{2 * least:.4g}: set a smaller bound, or null"
            )

    def __call__(self, updates: Updates) -> TokenLosses:
        advantages = updates.advantages
        # torch.where with two Python numbers would give float32, also for float64 advantages.
        tau = torch.full_like(advantages, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        losses = -4 / tau * (tau * (updates.ratio() - 1)).sigmoid() * advantages
        if self.dual_clip is None:
            return TokenLosses(losses)
        losses, far = dual_clipped(losses, advantages, self.dual_clip)
        return TokenLosses(losses, {"dual": far})
