from __future__ import annotations

import torch

from asyncrl.algorithms.advantages.base import Advantage, Estimate, Rollouts
from asyncrl.algorithms.group_statistics import Groups
from asyncrl.algorithms.parts import param


class GrpoTurns(Advantage):
    """GRPO with an advantage that is redistributed between the steps of an episode by their scores.

    Formula: A_t = grpo(R) + beta (c_k - mean) for the tokens t of step k; with c_k the score of step k, and the mean
    over the scores of the same episode
    Use: to credit single turns when the policy decides how many turns there are
    Source: Group-in-Group Policy Optimization for LLM Agent Training, 2025, in a zero-sum form
    Caveat: the terms c_k - mean sum to 0 over the steps of an episode, but not over its tokens. A baseline over the
    k-th steps of all members would be biased, since the policy decides which steps exist. So the mean is over one
    episode.
    """

    name = "grpo_turns"
    needs_steps = True

    beta: float = param(0.5, "weight of a step's centred score", "[0, inf)")
    normalise_std: bool = param(True, "divide the episode's advantage by the group's standard deviation")

    def __call__(self, rollouts: Rollouts) -> Estimate:
        episodes = rollouts.episodes
        outcome = episodes.groups.normalise(episodes.reward, self.normalise_std)
        own = Groups(episodes.step_sequence, episodes.count).centre(episodes.step_scores)
        follows = episodes.step_sequence[1:] == episodes.step_sequence[:-1]
        drop = own.clone()
        drop[:-1] -= torch.where(follows, own[1:], 0.0)
        return Estimate(rollouts.spread(outcome) + self.beta * rollouts.after(drop))
