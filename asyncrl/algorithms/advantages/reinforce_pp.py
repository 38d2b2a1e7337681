"""REINFORCE++: discounted returns, whitened over the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.algorithms.advantages.base import Estimate, Rollouts, TokenAdvantage
from asyncrl.algorithms.view import linear_scan


@dataclass(frozen=True, kw_only=True)
class ReinforcePp(TokenAdvantage):
    """The return from each policy token on, whitened over the batch instead of a group.

    Formula: G_t = r_t + gamma G_{t+1} over policy tokens; A = whiten(G)
    Use: without groups or critic; with KL in the reward as the paper has it
    Source: REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models, 2025
    Caveat: the baseline is one number for all tasks, so easy tasks look good and hard ones bad.
    """

    name: ClassVar[str] = "reinforce_pp"

    def __call__(self, rollouts: Rollouts) -> Estimate:
        rewards = rollouts.rewards(self.step_weight)
        returns = linear_scan(rollouts.view.decay(self.gamma, rewards), rewards)
        return Estimate(rollouts.whiten(returns), returns)
