"""Samplers: which of the groups that are ready make the next batch, and with what importance weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

MIN_PRIORITY = 1e-3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that is ready: `order` is its place in time, `oldest` its oldest version, `spread` the standard deviation
    of its members' rewards."""

    order: int
    name: str
    oldest: int
    spread: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen group and its importance weight, at most 1."""

    candidate: Candidate
    weight: float = 1.0


class Sampler(Protocol):
    """Chooses `count` different groups out of at least as many."""

    def choose(self, ready: Sequence[Candidate], count: int, rng: np.random.Generator) -> list[Choice]: ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """Those that were complete first."""

    def choose(self, ready: Sequence[Candidate], count: int, rng: np.random.Generator) -> list[Choice]:
        return [Choice(each) for each in sorted(ready, key=lambda each: each.order)[:count]]


@dataclass(frozen=True, slots=True)
class Freshest:
    """Those with the newest oldest token; of equally fresh ones, those that were complete first."""

    def choose(self, ready: Sequence[Candidate], count: int, rng: np.random.Generator) -> list[Choice]:
        return [Choice(each) for each in sorted(ready, key=lambda each: (-each.oldest, each.order))[:count]]


@dataclass(frozen=True, slots=True)
class Prioritised:
    """Group i with probability P(i) proportional to p_i^alpha, without replacement, and the weight (N P(i))^-beta
    divided by the largest one; p_i is the spread of its rewards, since a group without any teaches nothing.

    Source: Schaul et al., Prioritized Experience Replay, 2016, with the reward spread for the TD error.
    """

    alpha: float
    beta: float

    def choose(self, ready: Sequence[Candidate], count: int, rng: np.random.Generator) -> list[Choice]:
        powers = np.array([max(each.spread, MIN_PRIORITY) ** self.alpha for each in ready])
        chances = powers / powers.sum()
        chosen = sorted(rng.choice(len(ready), size=count, replace=False, p=chances))
        weights = (len(ready) * chances[chosen]) ** -self.beta
        weights /= weights.max()
        return [Choice(ready[index], float(weight)) for index, weight in zip(chosen, weights, strict=True)]
