from __future__ import annotations

from asyncrl.algorithms.advantages.base import Estimate, Rollouts, TokenAdvantage
from asyncrl.algorithms.linear_scan import linear_scan


class ReinforcePp(TokenAdvantage):
    """REINFORCE++: the return from each policy token on, whitened over the batch instead of a group.

    Formula: A = whiten(G), with G_t = r_t + gamma G_{t+1} over policy tokens
    Use: when there are no groups and no critic; as in the paper, subtract the KL from the reward
    Source: REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models, 2025
    Caveat: all tasks share one baseline, so answers to easy tasks look good and answers to hard tasks look bad.
    """

    name = "reinforce_pp"

    def __call__(self, rollouts: Rollouts) -> Estimate:
        rewards = rollouts.rewards(self.step_weight)
        returns = linear_scan(rollouts.view.decay(self.gamma, rewards), rewards)
        return Estimate(rollouts.whiten(returns), returns)
