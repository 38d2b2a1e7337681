"""On-policy optimisation with the variance-optimal baseline under a length assumption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.groups import Groups


@dataclass(frozen=True, kw_only=True)
class Opo(SequenceAdvantage):
    """The reward against the group's length-weighted mean.

    Formula: A = R - sum(len R) / sum(len) over the group, len in policy tokens
    Use: when lengths differ much within a group: long members have the larger gradients, so they weigh more in the
    baseline
    Source: On-Policy RL with Optimal Reward Baseline, 2025
    Caveat: the optimality assumes on-policy data and gradients whose squared norm grows with length.
    """

    name: ClassVar[str] = "opo"
    needs_group: ClassVar[bool] = True

    def scores(self, episodes: Episodes) -> Tensor:
        groups = Groups.of(episodes.group)
        above = episodes.reward.double() - groups.least(episodes.reward)
        return above - groups.sum(above * episodes.lengths) / groups.sum(episodes.lengths)
