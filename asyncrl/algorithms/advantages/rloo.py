from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes


class Rloo(SequenceAdvantage):
    """REINFORCE with a leave-one-out baseline: the reward minus the mean of the group's other members.

    Formula: A_i = R_i - mean of the other members = n / (n - 1) (R_i - mean)
    Use: an unbiased group baseline without scaling
    Source: Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs, 2024
    Caveat: the member of a group of one has no baseline and gets 0.
    """

    name = "rloo"
    needs_group = True

    def scores(self, episodes: Episodes) -> Tensor:
        return episodes.groups.leave_one_out(episodes.reward)
