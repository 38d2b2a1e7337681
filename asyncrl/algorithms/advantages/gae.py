from __future__ import annotations

from asyncrl.algorithms.advantages.base import Estimate, Rollouts, TokenAdvantage
from asyncrl.algorithms.linear_scan import linear_scan
from asyncrl.algorithms.parts import param


class Gae(TokenAdvantage):
    """Generalised advantage estimation: exponentially weighted temporal differences of a critic's values.

    Formula: A_t = delta_t + gamma lam A_{t+1}, with delta_t = r_t + gamma V_{t+1} - V_t; the critic's target is
    R_t = A_t + V_t
    Use: with a critic, for long episodes with intermediate rewards
    Source: High-Dimensional Continuous Control Using Generalized Advantage Estimation, 2015
    Caveat: t + 1 is the next policy token, so gamma and lam do not count the tokens of tool results. The value after
    the last token is 0, even if the episode was cut off.
    """

    name = "gae"
    needs_critic = True

    lam: float = param(
        0.95, "lambda; 0: A_t is a single temporal difference delta_t; 1: A_t is the whole return minus V_t", "[0, 1]"
    )
    whiten: bool = param(False, "whiten the advantages over the batch's policy tokens")

    def __call__(self, rollouts: Rollouts) -> Estimate:
        values = rollouts.values
        assert values is not None
        delta = rollouts.differences(values, values, self.gamma, self.step_weight)
        advantages = linear_scan(rollouts.view.decay(self.gamma * self.lam, delta), delta)
        return Estimate(rollouts.whiten(advantages) if self.whiten else advantages, advantages + values)
