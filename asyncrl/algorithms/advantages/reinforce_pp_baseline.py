"""REINFORCE++ with the group's mean as baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncrl.algorithms.advantages.base import Estimate, Rollouts, SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.groups import Groups


@dataclass(frozen=True, kw_only=True)
class ReinforcePpBaseline(SequenceAdvantage):
    """The reward against its group's mean, whitened over the policy tokens of the batch.

    Formula: A = whiten(R - mean over the group)
    Use: groups, with one scale for the whole batch instead of one for each group
    Source: REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models, 2025
    Caveat: whitening is by token, so long sequences set its mean and scale.
    """

    name: ClassVar[str] = "reinforce_pp_baseline"
    needs_group: ClassVar[bool] = True

    def scores(self, episodes: Episodes) -> Tensor:
        return Groups.of(episodes.group).centre(episodes.reward)

    def __call__(self, rollouts: Rollouts) -> Estimate:
        return Estimate(rollouts.whiten(super().__call__(rollouts).advantages))
