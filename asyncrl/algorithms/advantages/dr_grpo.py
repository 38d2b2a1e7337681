"""GRPO without its division by the standard deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.groups import Groups


@dataclass(frozen=True, kw_only=True)
class DrGrpo(SequenceAdvantage):
    """The reward against its group's mean.

    Formula: A = R - mean over the group; A = R in a group of one
    Use: when hard and easy tasks should weigh the same; with aggregation seq-mean-token-sum-norm
    Source: Understanding R1-Zero-Like Training: A Critical Perspective, 2025
    Caveat: the scale of the advantage is the scale of the reward, so the learning rate depends on it.
    """

    name: ClassVar[str] = "dr_grpo"

    def scores(self, episodes: Episodes) -> Tensor:
        return Groups.of(episodes.group).normalise(episodes.reward, by_std=False)
