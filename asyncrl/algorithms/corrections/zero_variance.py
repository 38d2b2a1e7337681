from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.parts import param


class ZeroVariance(Correction):
    """Dynamic sampling in the learner: drops groups whose rewards are all equal, since they do not show what is better.

    Formula: drop the group if max R - min R <= tolerance
    Use: with a KL or entropy term, which would otherwise train on such groups
    Source: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025 (dynamic sampling)
    Caveat: the batch shrinks: no other groups replace the dropped ones.
    """

    name = "zero_variance"
    whole_batch = True
    uses_ratio = False

    tolerance: float = param(0.0, "largest spread of rewards that counts as equal", "[0, inf)")

    def keep(self, ages: Ages) -> Tensor:
        assert ages.episodes is not None
        reward, groups = ages.episodes.reward, ages.episodes.groups
        return ages.view.by_sequence(groups.greatest(reward) - groups.least(reward) > self.tolerance)
