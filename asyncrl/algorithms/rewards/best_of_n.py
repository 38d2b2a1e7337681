from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.parts import param
from asyncrl.algorithms.rewards.base import Reward


class BestOfN(Reward):
    """Takes a named score out of the rewards of all members of a group but the best. Members that share the best score
    keep it.

    Formula: R - weight max(s, 0) where s is below the greatest s of the group, s a named score of the labels
    Use: with scoring.shaping.prm_aggregation=best_of_n, so that only the answer that a process model likes most earns
    Source: no paper; an aggregation of verl's process-reward managers
    Caveat: a negative score is kept: if it were taken away, a member would gain by a worse score. `weight` is the
    score's weight in the reward.
    """

    name = "best_of_n"

    score: str = param("process", "the named score: process, or another of the labels' extra scores")
    weight: float = param(1.0, "what the score weighs in the reward: scoring.shaping.process_weight", "[0, inf)")

    @property
    def reads(self) -> Sequence[str]:
        return [self.score]

    def __call__(self, episodes: Episodes) -> Tensor:
        scores = episodes.score(self.score).double()
        beaten = scores < episodes.groups.greatest(scores)
        return episodes.reward - self.weight * torch.where(beaten, scores.clamp(min=0), torch.zeros_like(scores))
