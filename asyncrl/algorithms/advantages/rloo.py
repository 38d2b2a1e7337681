"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.groups import Groups


@dataclass(frozen=True, kw_only=True)
class Rloo(SequenceAdvantage):
    """The reward against the mean of the group's other members.

    Formula: A_i = R_i - mean of the others = n / (n - 1) (R_i - mean)
    Use: an unbiased group baseline without any scaling
    Source: Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs, 2024
    Caveat: needs groups of two or more; a member alone has no baseline and gets 0.
    """

    name: ClassVar[str] = "rloo"
    needs_group: ClassVar[bool] = True

    def scores(self, episodes: Episodes) -> Tensor:
        return Groups.of(episodes.group).leave_one_out(episodes.reward)
