"""A user's own part, as docs/algorithms.md shows it."""

from __future__ import annotations

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates
from asyncrl.algorithms.parts import param


class Squared(Loss):
    """A policy gradient with a quadratic penalty.

    Formula: -A log pi_theta + weight log^2 r
    """

    name = "squared"

    weight: float = param(0.1, "weight of the penalty", "[0, inf)")

    def __call__(self, updates: Updates) -> TokenLosses:
        penalty = self.weight * updates.log_ratio.square()
        return TokenLosses(penalty - updates.advantages * updates.logprobs)
