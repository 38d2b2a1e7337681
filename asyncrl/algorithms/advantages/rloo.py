from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes


class Rloo(SequenceAdvantage):
    """REINFORCE with a leave-one-out baseline: the reward minus the mean of the group's other members.

    Formula: A = R - mean of the group's other members = (n / (n - 1)) (R - mean of all n members)
    Use: for an unbiased baseline over the group, without scaling
    Source: Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs, 2024
    Caveat: in a group of one there is no baseline, and A = 0.
    """

    name = "rloo"
    needs_group = True

    def scores(self, episodes: Episodes) -> Tensor:
        return episodes.groups.leave_one_out(episodes.reward)
