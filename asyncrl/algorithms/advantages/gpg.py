from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes


class GpgAdvantage(SequenceAdvantage):
    """The reward minus the group's mean, scaled up if only few groups of the batch have unequal rewards.

    Formula: A = alpha (R - mean), with the group's mean, and alpha = (number of sequences in the batch) / (number of
    sequences in groups whose rewards differ)
    Use: with loss gpg, so that groups with equal rewards, which have no gradient, do not shrink the step
    Source: GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, 2025
    Caveat: alpha has no bound: if a single one of a hundred groups has unequal rewards, its advantages are multiplied
    by a hundred.
    """

    name = "gpg"
    needs_group = True

    def scores(self, episodes: Episodes) -> Tensor:
        groups = episodes.groups
        counts = (groups.greatest(episodes.reward) > groups.least(episodes.reward)).count_nonzero().clamp(min=1)
        return groups.centre(episodes.reward) * episodes.count / counts
