from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.parts import param


class Grpo(SequenceAdvantage):
    """Group relative policy optimisation: the reward relative to its group, in standard deviations.

    Formula: A = (R - mean) / (std + 1e-6), std unbiased over the group; A = R in a group of one
    Use: the default for verifiable rewards without a critic
    Source: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, 2024
    Caveat: the division by std gives very easy and very hard tasks more weight; dr_grpo does not divide.
    """

    name = "grpo"

    normalise_std: bool = param(True, "divide by the group's standard deviation")

    def scores(self, episodes: Episodes) -> Tensor:
        return episodes.groups.normalise(episodes.reward, self.normalise_std)
