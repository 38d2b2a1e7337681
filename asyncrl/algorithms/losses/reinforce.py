from __future__ import annotations

from asyncrl.algorithms.log_ratios import LEVEL_MEANING, LEVELS
from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates, log_behaviour_ratio
from asyncrl.algorithms.parts import param


class Reinforce(Loss):
    """REINFORCE with truncated importance sampling directly from the behaviour policy.

    Formula: -sg(min(pi_theta / mu, cap)) A log pi_theta, with the ratio pi_theta / mu over the span that `level` names
    Use: for off-policy data without a proximal policy: one ratio does the whole correction
    Source: Simple statistical gradient-following algorithms for connectionist reinforcement learning, 1992; Truncated
    Importance Sampling, 2008
    Caveat: there is no trust region. The cap and the learning rate alone limit a step.
    """

    name = "reinforce"
    corrects = True
    reads_proximal = False

    level: str = param("token", LEVEL_MEANING, choices=LEVELS)
    cap: float = param(2.0, "largest ratio that is used as a weight", "(0, inf]")

    def __call__(self, updates: Updates) -> TokenLosses:
        ratio = log_behaviour_ratio(updates, self.level).exp()
        weights = ratio.clamp(max=self.cap)
        return TokenLosses(-weights * updates.advantages * updates.logprobs, {"high": ratio > self.cap})
