from __future__ import annotations

import torch

from asyncrl.algorithms.advantages.base import Advantage, Estimate, Rollouts
from asyncrl.algorithms.group_statistics import Groups
from asyncrl.algorithms.parts import param


class GrpoTurns(Advantage):
    """GRPO with an advantage that is redistributed between the steps of an episode by their scores.

    Formula: A_t = grpo(R) + beta (c_k - mean c) for the tokens of step k, mean over the episode's own steps
    Use: turn-level credit if the policy decides when to stop
    Source: Group-in-Group Policy Optimization for LLM Agent Training, 2025, in a zero-sum form
    Caveat: the shifts of an episode sum to 0 over its steps, not over its tokens. A baseline by turn index would be
    biased, since the policy decides which turns exist; this estimator compares an episode only with itself.
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
