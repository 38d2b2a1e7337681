"""REINFORCE with truncated importance sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates
from asyncrl.algorithms.parts import param
from asyncrl.algorithms.view import clamp_log


@dataclass(frozen=True, kw_only=True)
class Reinforce(Loss):
    """The policy gradient, weighted straight from the behaviour policy.

    Formula: -sg(min(pi_theta / mu, cap)) A log pi_theta
    Use: off-policy data without a proximal policy: one ratio does all of the correction
    Source: Simple statistical gradient-following algorithms for connectionist reinforcement learning, 1992; Truncated
    Importance Sampling, 2008
    Caveat: no trust region: nothing stops a large step but the cap and the learning rate.
    """

    name: ClassVar[str] = "reinforce"
    corrects: ClassVar[bool] = True

    cap: float = param(2.0, "largest weight", "(0, inf]")

    def __call__(self, updates: Updates) -> TokenLosses:
        ratio = clamp_log(updates.logprobs.detach() - updates.behaviour).exp()
        weights = ratio.clamp(max=self.cap)
        return TokenLosses(-weights * updates.advantages * updates.logprobs, {"high": ratio > self.cap})
