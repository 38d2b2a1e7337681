"""The plain policy gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates


@dataclass(frozen=True, kw_only=True)
class Gpg(Loss):
    """REINFORCE, with nothing added.

    Formula: -A log pi_theta
    Use: on-policy data with one update a step; after vtrace, whose advantages are corrected already
    Source: GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, 2025
    Caveat: nothing holds the policy back on a second update.
    """

    name: ClassVar[str] = "gpg"

    def __call__(self, updates: Updates) -> TokenLosses:
        return TokenLosses(-updates.advantages * updates.logprobs)
