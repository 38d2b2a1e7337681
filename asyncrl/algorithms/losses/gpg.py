from __future__ import annotations

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates


class Gpg(Loss):
    """The plain policy gradient.

    Formula: -A log pi_theta
    Use: on-policy data with one update per step, or vtrace, whose advantages are already corrected
    Source: GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, 2025
    Caveat: no term limits the policy's change in a second update.
    """

    name = "gpg"
    reads_proximal = False

    def __call__(self, updates: Updates) -> TokenLosses:
        return TokenLosses(-updates.advantages * updates.logprobs)
