"""Group relative policy optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.groups import Groups
from asyncrl.algorithms.parts import param


@dataclass(frozen=True, kw_only=True)
class Grpo(SequenceAdvantage):
    """The reward against its group, in units of the group's spread.

    Formula: A = (R - mean) / (std + 1e-6), std unbiased over the group; A = R in a group of one
    Use: the default for verifiable rewards without a critic
    Source: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, 2024
    Caveat: dividing by std weighs nearly solved and nearly hopeless tasks up; dr_grpo does not.
    """

    name: ClassVar[str] = "grpo"

    normalise_std: bool = param(True, "divide by the group's standard deviation")

    def scores(self, episodes: Episodes) -> Tensor:
        return Groups.of(episodes.group).normalise(episodes.reward, self.normalise_std)
