from __future__ import annotations

from asyncrl.algorithms.losses.base import Loss, TokenLosses, Updates


class Gpg(Loss):
    """The plain policy gradient.

    Formula: -A log pi_theta
    Use: on-policy data with one update a step, or vtrace, whose advantages are corrected already
    Source: GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, 2025
    Caveat: nothing holds the policy back on a second update.
    """

    name = "gpg"
    reads_proximal = False

    def __call__(self, updates: Updates) -> TokenLosses:
        return TokenLosses(-updates.advantages * updates.logprobs)
