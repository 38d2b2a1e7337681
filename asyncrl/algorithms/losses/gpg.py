from __future__ import annotations

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates


class Gpg(Loss):
    """The plain policy gradient.

    Formula: -A log pi_theta
    Use: for on-policy data with one update per step, or with advantage vtrace, which already corrects for old data
    Source: GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, 2025
    Caveat: nothing limits how far a second update of the same step moves the policy.
    """

    name = "gpg"
    reads_proximal = False

    def __call__(self, updates: Updates) -> TokenLosses:
        return TokenLosses(-updates.advantages * updates.logprobs)
