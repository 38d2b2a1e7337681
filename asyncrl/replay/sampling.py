"""The choice of complete groups to train: filters refuse groups, samplers choose the next batch out of the others.

Groups beyond the age bound never come here: their eviction is in `planning.py`. Samplers differ in the staleness that
they prefer within that bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar, Protocol

import numpy as np

from asyncrl.replay.records import ReadyGroup, TrajectoryRecord

MIN_PRIORITY = 1e-3
ZERO_VARIANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Filters:
    """Refuses groups whose members all have the same `score` (reward or outcome), whose mean reward is outside limits,
    or with a member that is too long. None is no limit. A demonstration does not count in the mean. Refused groups are
    counted by reason, and replaced."""

    zero_variance: bool = False
    score: str = "reward"
    min_reward: float | None = None
    max_reward: float | None = None
    max_tokens: int | None = None

    def reason(self, members: Sequence[TrajectoryRecord]) -> str | None:
        """Why the group is refused; None where it is kept."""
        scores = [getattr(member, self.score) for member in members]
        mean = fmean(member.reward for member in members if not member.is_demonstration)
        if self.zero_variance and max(scores) - min(scores) < ZERO_VARIANCE:
            return "zero_variance"
        if self.min_reward is not None and mean < self.min_reward:
            return "reward_low"
        if self.max_reward is not None and mean > self.max_reward:
            return "reward_high"
        if self.max_tokens is not None and max(member.tokens for member in members) > self.max_tokens:
            return "too_long"
        return None


class Sampler(Protocol):
    """Chooses `count` different groups out of at least as many, which stand in the order in which they were completed.
    Returns the index of each chosen group, and its importance weight, at most 1. `plans_ahead`: a batch may be chosen
    while the one before it is trained, without those groups that are completed meanwhile."""

    plans_ahead: ClassVar[bool]

    def choose(self, ready: Sequence[ReadyGroup], count: int, rng: np.random.Generator) -> list[tuple[int, float]]: ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """The groups that were completed first."""

    plans_ahead: ClassVar[bool] = True

    def choose(self, ready: Sequence[ReadyGroup], count: int, rng: np.random.Generator) -> list[tuple[int, float]]:
        return [(index, 1.0) for index in range(count)]


@dataclass(frozen=True, slots=True)
class Oldest:
    """The groups whose oldest token is the oldest, so that few become too old; of equally old ones, those that were
    completed first."""

    plans_ahead: ClassVar[bool] = True

    def choose(self, ready: Sequence[ReadyGroup], count: int, rng: np.random.Generator) -> list[tuple[int, float]]:
        return [(index, 1.0) for index in sorted(range(len(ready)), key=lambda index: ready[index].oldest)[:count]]


@dataclass(frozen=True, slots=True)
class Freshest:
    """The groups whose oldest token is the newest; of equally fresh ones, those that were completed first."""

    plans_ahead: ClassVar[bool] = False

    def choose(self, ready: Sequence[ReadyGroup], count: int, rng: np.random.Generator) -> list[tuple[int, float]]:
        return [(index, 1.0) for index in sorted(range(len(ready)), key=lambda index: -ready[index].oldest)[:count]]


@dataclass(frozen=True, slots=True)
class Prioritised:
    """Group i with probability P(i) proportional to p_i^alpha, without replacement, and the weight (N P(i))^-beta
    divided by the largest one; p_i is the spread of its rewards, since a group without any teaches nothing.

    Source: Schaul et al., Prioritized Experience Replay, 2016, with the reward spread for the TD error.
    """

    alpha: float
    beta: float
    plans_ahead: ClassVar[bool] = False

    def choose(self, ready: Sequence[ReadyGroup], count: int, rng: np.random.Generator) -> list[tuple[int, float]]:
        powers = np.array([max(each.spread, MIN_PRIORITY) ** self.alpha for each in ready])
        chances = powers / powers.sum()
        chosen = sorted(rng.choice(len(ready), size=count, replace=False, p=chances).tolist())
        weights = (len(ready) * chances[chosen]) ** -self.beta
        return list(zip(chosen, (weights / weights.max()).tolist(), strict=True))
