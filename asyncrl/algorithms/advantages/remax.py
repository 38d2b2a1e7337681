from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import SequenceAdvantage
from asyncrl.algorithms.batch import Episodes
from asyncrl.errors import InvariantError


class Remax(SequenceAdvantage):
    """REINFORCE with the reward of the group's greedily sampled member as baseline.

    Formula: A = R - R_greedy, with R_greedy the reward of the group's greedy member; A = 0 for the greedy member itself
    Use: to take one greedy sample per group as a cheap baseline; set algorithm.greedy_sibling=true
    Source: ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models,
    2023
    Caveat: the greedy member is as old as the others, so the current policy's greedy reward may differ from this
    baseline. The greedy member is not trained.
    """

    name = "remax"
    needs_greedy = True
    needs_group = True

    def scores(self, episodes: Episodes) -> Tensor:
        """Raises InvariantError: a group has no greedy member."""
        if episodes.greedy is None:
            raise InvariantError("greedy is missing: remax needs one greedily sampled member in every group")
        groups, reward = episodes.groups, episodes.reward.double()
        siblings = groups.sum(episodes.greedy)
        if not bool((siblings > 0).all()):
            group = int(episodes.group[siblings == 0][0])
            raise InvariantError(f"group {group} has no greedy member: remax needs one in every group")
        baseline = groups.sum(torch.where(episodes.greedy, reward, 0.0)) / siblings
        return torch.where(episodes.greedy, 0.0, reward - baseline)
