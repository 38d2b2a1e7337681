from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.parts import param


class ZeroVariance(Correction):
    """Dynamic sampling in the learner: drops groups whose members all have the same score, since no member
    is better than another.

    Formula: drop the group if (max of s) - (min of s) <= tolerance, with s the score of its members that `score` names
    Use: with a penalty on long episodes, since it makes the rewards of equally good answers differ; or with a KL or an
    entropy term, since it would otherwise train such groups
    Source: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025 (dynamic sampling, by the accuracy)
    Caveat: the batch becomes smaller, while replay.filter.zero_variance replaces the groups. If rewards contain more
    than the outcome, such as process scores, set score=reward.
    """

    name = "zero_variance"
    whole_batch = True
    uses_ratio = False

    score: str = param(
        "outcome",
        "score that is compared; outcome: the outcome before any shaping; reward: the reward after all changes; or the "
        "name of an extra score",
    )
    tolerance: float = param(0.0, "largest spread of scores that counts as equal", "[0, inf)")

    @property
    def reads(self) -> Sequence[str]:
        return [self.score]

    def keep(self, ages: Ages) -> Tensor:
        assert ages.episodes is not None
        score, groups = ages.episodes.score(self.score), ages.episodes.groups
        return ages.view.by_sequence(groups.greatest(score) - groups.least(score) > self.tolerance)
