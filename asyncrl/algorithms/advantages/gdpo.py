from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.groups import Groups
from asyncrl.algorithms.parts import param
from asyncrl.errors import InvariantError


class Gdpo(SequenceAdvantage):
    """Group reward-decoupled normalisation: GRPO for each named reward, then their weighted sum, whitened over the
    batch's sequences.

    Formula: A = whiten(sum_k weight_k grpo(R_k)), R_k the named scores of the labels
    Use: several rewards of different scales (outcome, format, length), none of which should dominate
    Source: GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization, 2026
    Caveat: `reward`, and a KL charged to it, have no effect unless `weights` names `reward`.
    """

    name = "gdpo"
    needs_group = True

    weights: dict[str, float] | None = param(
        None, "weight of each named score (reward, outcome, or an extra); null weighs every extra 1"
    )

    def scores(self, episodes: Episodes) -> Tensor:
        """Raises InvariantError: a weighted score is not among the labels' scores."""
        groups = episodes.groups
        named = episodes.named
        weights = self.weights or dict.fromkeys(episodes.extra, 1.0)
        missing = [name for name in weights if name not in named]
        if missing or not weights:
            raise InvariantError(f"gdpo weighs {missing or 'extra scores'}, and the labels have {sorted(named)}")
        total = sum(weight * groups.normalise(named[name], by_std=True) for name, weight in weights.items())
        whole = Groups(torch.zeros_like(episodes.group), 1)
        return whole.centre(torch.as_tensor(total)) / (whole.std(torch.as_tensor(total)) + 1e-8)
