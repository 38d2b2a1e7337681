"""Maximum-likelihood reinforcement learning: rewards in units of the group's mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.groups import Groups


@dataclass(frozen=True, kw_only=True)
class MaxRl(SequenceAdvantage):
    """The reward relative to the group's mean, so that rare successes weigh more.

    Formula: A = (R - mean) / mean, 0 where mean <= 0
    Use: hard tasks with 0/1 rewards; approaches maximum likelihood of success as groups grow
    Source: Maximum Likelihood Reinforcement Learning, 2026
    Caveat: meant for rewards of 0 or more; one success among n gives an advantage of n - 1.
    """

    name: ClassVar[str] = "maxrl"
    needs_group: ClassVar[bool] = True

    def scores(self, episodes: Episodes) -> Tensor:
        groups, reward = Groups.of(episodes.group), episodes.reward.double()
        mean = groups.sum(reward) / groups.size()
        return torch.where(mean > 0, groups.centre(reward) / mean, 0.0)
