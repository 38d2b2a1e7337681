"""Scales of the policy's learning rate: the factor of an update, at most 1, multiplies the rate of the schedule.

A scale reads sums over all passes and ranks of one update, so every rank computes the same factor, for any split of the
minibatch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.algorithms.parts import Part, param
from asyncrl.algorithms.policy_tokens import PolicyTokens

PREFIX = "lr_scale/"
"""The prefix of the sums that a scale reads."""
LOG_LIMIT = 300.0
"""Log-weights of sequences are clamped to +-300: float64 holds the squares of such weights. Other log-ratios are
clamped to +-20. The log-weight of a long sequence is often below -20, so that bound would make many weights equal."""


class LrScale(Part):
    """The base class of the scales."""

    kind = "lr_scale"

    @abstractmethod
    def sums(self, view: PolicyTokens, log_policy: Tensor) -> dict[str, Tensor]:
        """The sums of one pass, each float64[], by name. log_policy float[M] is log pi_theta - log mu (clamped) of the
        kept policy tokens `view`. The names must begin with PREFIX."""

    @abstractmethod
    def __call__(self, sums: Mapping[str, float]) -> float:
        """The factor of the learning rate, from the sums over the passes of the update."""


class Unscaled(LrScale):
    """All updates have the learning rate of the schedule.

    Formula: 1
    Use: by default
    Source: no paper
    """

    name = "none"

    def sums(self, view: PolicyTokens, log_policy: Tensor) -> dict[str, Tensor]:
        return {}

    def __call__(self, sums: Mapping[str, float]) -> float:
        return 1.0


class Ess(LrScale):
    """Smaller updates if few sequences dominate the minibatch, because their importance weights are far larger than the
    others'.

    Formula: min(1, rho / base), or its square root with rule=sqrt. rho = (sum w)^2 / (S sum w^2) is the effective
    sample size of the S sequences that have kept tokens. The weight of a sequence y is w = pi_theta(y) / mu(y), a
    product over its kept tokens
    Use: for old data; sqrt fits AdamW. linear, VCPO's rule for plain gradient descent, lowers the rate more. If
    even fresh data have a rho below 1, since engine and learner compute different log-probs, set base to that rho
    Source: Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs, 2026 (VCPO)
    Caveat: VCPO's other part, a baseline from the gradient norm of every sequence, is not here. The weights of long
    sequences are products of many ratios, so rho falls with the length. AdamW's weight decay is scaled, too.
    """

    name = "ess"

    base: float = param(1.0, "smallest rho at which an update has the whole learning rate", "(0, 1]")
    rule: str = param("sqrt", "how the learning rate follows rho", choices=("sqrt", "linear"))

    def sums(self, view: PolicyTokens, log_policy: Tensor) -> dict[str, Tensor]:
        spans = view.sequences
        present = spans.lengths > 0
        weights = torch.where(present, spans.sum(log_policy).clamp(-LOG_LIMIT, LOG_LIMIT).exp(), 0.0)
        found = {"weights": weights.sum(), "squares": weights.square().sum(), "sequences": present.sum().double()}
        return {PREFIX + name: value for name, value in found.items()}

    def __call__(self, sums: Mapping[str, float]) -> float:
        weights, squares, sequences = (sums.get(PREFIX + name, 0.0) for name in ("weights", "squares", "sequences"))
        if not sequences:
            return 1.0
        share = min(1.0, weights**2 / (sequences * squares) / self.base)
        return math.sqrt(share) if self.rule == "sqrt" else share
