from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes


class MaxRl(SequenceAdvantage):
    """The reward relative to the group's mean, which gives rare successes more weight.

    Formula: A = (R - mean) / mean where mean > 0, else 0; with the group's mean
    Use: for hard tasks with rewards of 0 and 1; with large groups, it nearly maximises the likelihood of success
    Source: Maximum Likelihood Reinforcement Learning, 2026
    Caveat: rewards must not be negative. A single success among n members gets an advantage of n - 1.
    """

    name = "maxrl"
    needs_group = True

    def scores(self, episodes: Episodes) -> Tensor:
        groups, reward = episodes.groups, episodes.reward.double()
        mean = groups.sum(reward) / groups.size()
        return torch.where(mean > 0, groups.centre(reward) / mean, 0.0)
