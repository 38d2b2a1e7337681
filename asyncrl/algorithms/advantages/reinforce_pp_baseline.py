from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.base import Estimate, Rollouts, SequenceAdvantage
from asyncrl.algorithms.batch import Episodes


class ReinforcePpBaseline(SequenceAdvantage):
    """REINFORCE++ with the group's mean as baseline.

    Formula: A = whiten(R - mean), with the group's mean, whitened over the policy tokens of the batch
    Use: with groups, when one scale for the whole batch is better than one for each group
    Source: REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models, 2025
    Caveat: whitening counts tokens, so long sequences have the most effect on the mean and the scale.
    """

    name = "reinforce_pp_baseline"
    needs_group = True

    def scores(self, episodes: Episodes) -> Tensor:
        return episodes.groups.centre(episodes.reward)

    def __call__(self, rollouts: Rollouts) -> Estimate:
        return Estimate(rollouts.whiten(super().__call__(rollouts).advantages))
