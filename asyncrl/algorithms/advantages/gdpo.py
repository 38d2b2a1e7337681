from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.group_statistics import Groups
from asyncrl.algorithms.parts import param
from asyncrl.errors import ConfigError


class Gdpo(SequenceAdvantage):
    """Group reward-decoupled normalisation: GRPO for each named reward, then their weighted sum, whitened over the
    batch's sequences.

    Formula: A = whiten(sum_k weight_k grpo(R_k)), with R_k the scores that `weights` names
    Use: when rewards have different scales (outcome, format, length), and none of them should dominate
    Source: GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization, 2026
    Caveat: if `weights` does not contain `reward`, the reward has no effect, and neither has a KL in the reward.
    """

    name = "gdpo"
    needs_group = True

    weights: dict[str, float] = param(
        ...,
        "weight of each score: reward, outcome, or a score that every episode's labels have, such as rule/NAME/FORMAT",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weights:
            raise ConfigError(f"{self.setting('weights')}: name a score")

    @property
    def reads(self) -> Sequence[str]:
        return list(self.weights)

    def scores(self, episodes: Episodes) -> Tensor:
        groups = episodes.groups
        terms = [weight * groups.normalise(episodes.score(name), by_std=True) for name, weight in self.weights.items()]
        total = torch.stack(terms).sum(0)
        whole = Groups(torch.zeros_like(episodes.group), 1)
        return whole.centre(total) / (whole.std(total) + 1e-8)
