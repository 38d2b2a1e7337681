"""Chooses the complete groups on which the learner trains: filters refuse groups, and samplers select the next batch
from the accepted groups.

Before a sampler chooses, `planning.py` evicts the groups that exceed the age bound. Samplers differ in the staleness
that they prefer within the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar, Protocol

import numpy as np

from asyncrl.replay.store.records import ReadyGroup, TrajectoryRecord
from asyncrl.types import Labels

MIN_PRIORITY = 1e-3
ZERO_VARIANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Filters:
    """Refuses complete groups. Refused groups are counted by reason and replaced. A limit that is `None` does not
    apply.

    - `zero_variance`: refuse a group whose members all have the same score
    - `score`: the score that `zero_variance` compares: "reward", "outcome", or the name of a score in the labels
    - `min_reward`, `max_reward`: the limits on the mean reward of a group, without its demonstration
    - `max_tokens`: the maximum number of tokens in each member
    """

    zero_variance: bool = False
    score: str = "reward"
    min_reward: float | None = None
    max_reward: float | None = None
    max_tokens: int | None = None

    @property
    def named(self) -> str | None:
        """The score in the labels that is compared. None: no score is compared, or the compared score is in the
        records."""
        return None if not self.zero_variance or self.score in ("reward", "outcome") else self.score

    def unmet(self, labels: Labels) -> str:
        """The reason why a group with these labels could not be compared; empty if it can."""
        if self.named is None or self.named in labels.extra:
            return ""
        return f"replay.filter.score={self.named}: the labels have only {sorted(labels.extra)!r:.500}"

    def reason(self, members: Sequence[TrajectoryRecord], named: Sequence[float] = ()) -> str | None:
        """The reason why the group is refused. `None` if it is accepted.

        If the property `named` names a score, the argument `named` has this score of each member. The argument is empty
        if a label lacks the score because the label is older than this filter. Then no scores are compared.
        """
        scores: Sequence[float] = ()
        if self.zero_variance:
            scores = [getattr(member, self.score) for member in members] if self.named is None else named
        mean = fmean(member.reward for member in members if not member.is_demonstration)
        if scores and max(scores) - min(scores) < ZERO_VARIANCE:
            return "zero_variance"
        if self.min_reward is not None and mean < self.min_reward:
            return "reward_low"
        if self.max_reward is not None and mean > self.max_reward:
            return "reward_high"
        if self.max_tokens is not None and max(member.tokens for member in members) > self.max_tokens:
            return "too_long"
        return None


class Sampler(Protocol):
    """Chooses `count` different groups from `ready`, which has at least as many. In `ready` the groups are in the order
    of their completion. Returns the index of each chosen group and its importance weight, at most 1. If `plans_ahead`
    is true, the next batch may be chosen while the learner trains on the current one. Groups that are completed in the
    meantime are then not considered."""

    plans_ahead: ClassVar[bool]

    def choose(self, ready: Sequence[ReadyGroup], count: int, rng: np.random.Generator) -> list[tuple[int, float]]: ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """Chooses the groups that were completed first."""

    plans_ahead: ClassVar[bool] = True

    def choose(self, ready: Sequence[ReadyGroup], count: int, rng: np.random.Generator) -> list[tuple[int, float]]:
        return [(index, 1.0) for index in range(count)]


@dataclass(frozen=True, slots=True)
class Oldest:
    """Chooses the groups with the oldest tokens, so that few groups become too old. Of equally old groups, it prefers
    those that were completed first."""

    plans_ahead: ClassVar[bool] = True

    def choose(self, ready: Sequence[ReadyGroup], count: int, rng: np.random.Generator) -> list[tuple[int, float]]:
        return [(index, 1.0) for index in sorted(range(len(ready)), key=lambda index: ready[index].oldest)[:count]]


@dataclass(frozen=True, slots=True)
class Freshest:
    """Chooses the groups whose oldest token is newest. Of equally fresh groups, it prefers those that were completed
    first."""

    plans_ahead: ClassVar[bool] = False

    def choose(self, ready: Sequence[ReadyGroup], count: int, rng: np.random.Generator) -> list[tuple[int, float]]:
        return [(index, 1.0) for index in sorted(range(len(ready)), key=lambda index: -ready[index].oldest)[:count]]


@dataclass(frozen=True, slots=True)
class Prioritised:
    """Chooses group i of the N ready groups with a probability P(i) proportional to p_i^alpha, without replacement. The
    weight of the group is (N P(i))^-beta, divided by the largest weight. p_i is the spread of the group's rewards,
    since equal rewards give no gradient.

    Source: Schaul et al., Prioritized Experience Replay, 2016, with the reward spread in place of the TD error.
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
