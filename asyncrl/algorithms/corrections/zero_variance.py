"""The dynamic-sampling filter, as far as the learner can do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.groups import Groups
from asyncrl.algorithms.parts import param


@dataclass(frozen=True, kw_only=True)
class ZeroVariance(Correction):
    """Drops groups whose rewards are all equal: they do not show what is better.

    Formula: drop the group if max R - min R <= tolerance
    Use: with a KL or entropy term, which such groups would otherwise still follow
    Source: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025 (dynamic sampling)
    Caveat: the batch shrinks; dropped groups are not made up for by others.
    """

    name: ClassVar[str] = "zero_variance"
    whole_batch: ClassVar[bool] = True
    uses_ratio: ClassVar[bool] = False

    tolerance: float = param(0.0, "largest spread of rewards that counts as equal", "[0, inf)")

    def keep(self, ages: Ages) -> Tensor:
        assert ages.episodes is not None
        reward, groups = ages.episodes.reward, Groups.of(ages.episodes.group)
        return ages.view.by_sequence(groups.greatest(reward) - groups.least(reward) > self.tolerance)
