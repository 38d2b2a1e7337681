"""Filters: which complete groups are not worth training. What is filtered is counted by reason, and replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.replay.records import Facts

ZERO_VARIANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Filters:
    """What refuses a group: rewards that are all the same, a mean reward below or above a limit, a member that is too
    long. None is no limit."""

    zero_variance: bool = False
    min_reward: float | None = None
    max_reward: float | None = None
    max_tokens: int | None = None

    def reason(self, members: Sequence[Facts]) -> str | None:
        """Why the group is refused; None where it is kept."""
        rewards = [member.reward for member in members]
        mean = sum(rewards) / len(rewards)
        if self.zero_variance and max(rewards) - min(rewards) < ZERO_VARIANCE:
            return "zero_variance"
        if self.min_reward is not None and mean < self.min_reward:
            return "reward_low"
        if self.max_reward is not None and mean > self.max_reward:
            return "reward_high"
        if self.max_tokens is not None and max(member.tokens for member in members) > self.max_tokens:
            return "too_long"
        return None
