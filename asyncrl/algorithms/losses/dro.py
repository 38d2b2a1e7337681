from __future__ import annotations

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates
from asyncrl.algorithms.parts import param


class Dro(Loss):
    """Direct reward optimisation: the policy gradient with a quadratic pull back to the proximal policy.

    Formula: -A log pi_theta + (beta / 2) log^2 r
    Use: for off-policy and offline data: the second term pulls the policy back, in place of a clip
    Source: Offline Regularised Reinforcement Learning for Large Language Models Alignment, 2024
    Caveat: the paper pulls the policy towards the behaviour policy: set algorithm.proximal=behaviour for that.
    """

    name = "dro"

    beta: float = param(0.05, "strength of the pull back to the proximal policy", "[0, inf)")

    def __call__(self, updates: Updates) -> TokenLosses:
        pull = self.beta / 2 * updates.log_ratio.square()
        return TokenLosses(pull - updates.advantages * updates.logprobs)
