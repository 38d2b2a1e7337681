from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.parts import param


class Grpo(SequenceAdvantage):
    """Group relative policy optimisation: the reward relative to its group, in standard deviations.

    Formula: A = (R - mean) / (std + 1e-6), with the group's mean and unbiased standard deviation; A = R in a group of
    one
    Use: by default, for verifiable rewards without a critic
    Source: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, 2024
    Caveat: the division by std gives more weight to very easy and very hard tasks than to others; dr_grpo does not
    divide.
    """

    name = "grpo"

    normalise_std: bool = param(True, "divide by the group's standard deviation")

    def scores(self, episodes: Episodes) -> Tensor:
        return episodes.groups.normalise(episodes.reward, self.normalise_std)
