from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.group_statistics import EPSILON
from asyncrl.algorithms.parts import param


class GrpoPassk(SequenceAdvantage):
    """GRPO for pass@k: only the best member of a group is reinforced, by its lead over the second best.

    Formula: A = (best - second) / (std + 1e-6) for the member with the best reward, and 0 for all others; with the two
    best rewards and the standard deviation of the group
    Use: when one right answer among k samples is enough, and the mean over the samples does not matter
    Source: Pass@k as a target of GRPO, after Optimizing Language Models for Inference Time Objectives, 2025
    Caveat: all members get 0 if several share the best reward, or if the group has a single member.
    """

    name = "grpo_passk"
    needs_group = True

    normalise_std: bool = param(True, "divide by the group's standard deviation")

    def scores(self, episodes: Episodes) -> Tensor:
        groups, reward = episodes.groups, episodes.reward.double()
        best = reward == groups.greatest(reward)
        alone = best & (groups.sum(best) == 1) & (groups.size() > 1)
        second = groups.greatest(torch.where(best, -torch.inf, reward))
        lead = torch.where(alone, reward - second, 0.0)
        return lead / (groups.std(reward) + EPSILON) if self.normalise_std else lead
