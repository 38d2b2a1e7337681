from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes


class DrGrpo(SequenceAdvantage):
    """GRPO without the division by the standard deviation.

    Formula: A = R - mean, with the group's mean; A = R in a group of one
    Use: when easy and hard tasks should have the same weight; choose aggregation seq-mean-token-sum-norm
    Source: Understanding R1-Zero-Like Training: A Critical Perspective, 2025
    Caveat: the advantage has the scale of the reward, so the best learning rate depends on that scale.
    """

    name = "dr_grpo"

    def scores(self, episodes: Episodes) -> Tensor:
        return episodes.groups.normalise(episodes.reward, by_std=False)
