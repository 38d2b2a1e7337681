"""GRPO for pass@k: only the best member of a group is reinforced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.groups import EPSILON, Groups
from asyncrl.algorithms.parts import param


@dataclass(frozen=True, kw_only=True)
class GrpoPassk(SequenceAdvantage):
    """The lead of the group's best member over its second.

    Formula: A = (best - second) / (std + 1e-6) for the best member, 0 for the others
    Use: when it counts that one of k samples is right, not their mean
    Source: Pass@k as a target of GRPO, after Optimizing Language Models for Inference Time Objectives, 2025
    Caveat: a tie for the first place, or a member alone, gives 0 to all.
    """

    name: ClassVar[str] = "grpo_passk"
    needs_group: ClassVar[bool] = True

    normalise_std: bool = param(True, "divide by the group's standard deviation")

    def scores(self, episodes: Episodes) -> Tensor:
        groups, reward = Groups.of(episodes.group), episodes.reward.double()
        best = reward == groups.greatest(reward)
        alone = best & (groups.sum(best) == 1) & (groups.size() > 1)
        second = groups.greatest(torch.where(best, -torch.inf, reward))
        lead = torch.where(alone, reward - second, 0.0)
        return lead / (groups.std(reward) + EPSILON) if self.normalise_std else lead
