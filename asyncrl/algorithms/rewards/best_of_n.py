from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.parts import param
from asyncrl.algorithms.rewards.base import Reward


class BestOfN(Reward):
    """Removes a named score from the rewards of all members of a group except the best. Members with the same best
    score keep it.

    Formula: R - weight max(s, 0) where s < (max of s over the group), else R; with s the score that `score` names
    Use: with scoring.shaping.prm_aggregation=best_of_n, so that only the answer with the best process score is rewarded
    Source: no paper; an aggregation of verl's process-reward managers
    Caveat: a negative score stays in the reward. If it were removed, a worse score would mean a larger reward.
    """

    name = "best_of_n"

    score: str = param("process", "name of the score: process, or another extra score of the labels")
    weight: float = param(1.0, "weight of the score in the reward, as in scoring.shaping.process_weight", "[0, inf)")

    @property
    def reads(self) -> Sequence[str]:
        return [self.score]

    def __call__(self, episodes: Episodes) -> Tensor:
        scores = episodes.score(self.score).double()
        beaten = scores < episodes.groups.greatest(scores)
        return episodes.reward - self.weight * torch.where(beaten, scores.clamp(min=0), torch.zeros_like(scores))
