from __future__ import annotations

from asyncrl.algorithms.advantages.base import Estimate, Rollouts, TokenAdvantage
from asyncrl.algorithms.linear_scan import linear_scan
from asyncrl.algorithms.parts import param


class Vtrace(TokenAdvantage):
    """V-trace: values and advantages corrected for the age of the data by truncated importance ratios.

    Formula: A_t = min(rho_pg_bar, w_t) (r_t + gamma v_{t+1} - V_t), and the critic's target is R_t = v_t; v_t = V_t +
    delta_t + gamma c_t (v_{t+1} - V_{t+1}); delta_t = min(rho_bar, w_t) (r_t + gamma V_{t+1} - V_t); c_t = lam
    min(c_bar, w_t)
    Use: with a critic and data of several versions; choose loss gpg and no correction
    Source: IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures, 2018
    Caveat: rho_bar decides for which policy the values are learned; c_bar affects only how fast they converge.
    """

    name = "vtrace"
    needs_critic = True
    uses_ratio = True

    lam: float = param(1.0, "lambda in c_t", "[0, 1]")
    rho_bar: float = param(1.0, "largest ratio w_t that multiplies a temporal difference", "(0, inf]")
    c_bar: float = param(1.0, "largest ratio w_t in c_t", "(0, inf]")
    rho_pg_bar: float = param(1.0, "largest ratio w_t that multiplies an advantage", "(0, inf]")

    def __call__(self, rollouts: Rollouts) -> Estimate:
        values, ratio, view = rollouts.values, rollouts.ratio, rollouts.view
        assert values is not None
        delta = rollouts.differences(values, values, self.gamma, self.step_weight) * ratio.clamp(max=self.rho_bar)
        trace = view.decay(self.gamma * self.lam, delta) * ratio.clamp(max=self.c_bar)
        targets = values + linear_scan(trace, delta)
        advantages = rollouts.differences(values, targets, self.gamma, self.step_weight)
        return Estimate(advantages * ratio.clamp(max=self.rho_pg_bar), targets)
