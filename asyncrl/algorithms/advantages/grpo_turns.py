"""GRPO with process scores that redistribute credit inside an episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncrl.algorithms.advantages.base import Advantage, Estimate, Rollouts
from asyncrl.algorithms.groups import Groups
from asyncrl.algorithms.parts import param


@dataclass(frozen=True, kw_only=True)
class GrpoTurns(Advantage):
    """The episode's advantage, moved between its steps by their scores, with nothing added in sum.

    Formula: A_t = grpo(R) + beta (c_k - mean c) for the tokens of step k, mean over the episode's own steps
    Use: turn-level credit where the policy decides when to stop
    Source: Group-in-Group Policy Optimization for LLM Agent Training, 2025, in a zero-sum form
    Caveat: the zero sum is over steps, not tokens. A baseline by turn index would be biased, since which turns exist
    depends on the policy; this one compares an episode only with itself.
    """

    name: ClassVar[str] = "grpo_turns"
    needs_steps: ClassVar[bool] = True

    beta: float = param(0.5, "how much a step's score moves", "[0, inf)")
    normalise_std: bool = param(True, "divide the episode's advantage by the group's standard deviation")

    def __call__(self, rollouts: Rollouts) -> Estimate:
        episodes = rollouts.episodes
        outcome = rollouts.groups.normalise(episodes.reward, self.normalise_std)
        own = Groups(episodes.step_sequence, episodes.count).centre(episodes.step_scores)
        follows = episodes.step_sequence[1:] == episodes.step_sequence[:-1]
        drop = own.clone()
        drop[:-1] -= torch.where(follows, own[1:], 0.0)
        return Estimate(rollouts.spread(outcome) + self.beta * rollouts.after(drop))
