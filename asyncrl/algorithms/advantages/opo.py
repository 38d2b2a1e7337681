from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes


class Opo(SequenceAdvantage):
    """The reward minus the group's length-weighted mean.

    Formula: A = R - sum(len R) / sum(len), with the sums over the group, and len the number of policy tokens of a
    member
    Use: when lengths differ much within a group: long members have larger gradients, so they get more weight in the
    baseline
    Source: On-Policy RL with Optimal Reward Baseline, 2025
    Caveat: the baseline is optimal only if data are on-policy, and the squared norm of a member's gradient is
    proportional to its length.
    """

    name = "opo"
    needs_group = True

    def scores(self, episodes: Episodes) -> Tensor:
        groups = episodes.groups
        above = episodes.reward.double() - groups.least(episodes.reward)
        return above - groups.sum(above * episodes.lengths) / groups.sum(episodes.lengths)
