from __future__ import annotations

import math

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.parts import param
from asyncrl.errors import ConfigError


class Reject(Correction):
    """Drops tokens, turns or whole sequences if the divergence between behaviour and proximal policy is outside two
    bounds. Does not set weights.

    Formula: keep if low <= k <= high; k is the divergence that `by` names (k1 = -log w, k2 = log^2 w / 2, k3 = w - 1 -
    log w, ratio = w, or difference = pi_prox - mu), over the tokens that `over` names; w = pi_prox / mu
    Use: to train only on data within a trust region; for long episodes, choose over=sequence_mean. by=difference rarely
    drops tokens of small probability, whose ratios are noise
    Source: Trust Region Masking for Long-Horizon LLM Reinforcement Learning, 2025; difference and turn_mean:
    Reinforcement Learning Optimization for Large-Scale Learning: An Efficient and User-Friendly Scaling Library, 2025
    (ROLL, whose bounds are -0.2 and 0.2, and whose segments are turns)
    Caveat: k1 and difference can be negative, so set both bounds for them; k2 and k3 are never negative.
    """

    name = "reject"

    by: str = param("k3", "the divergence of a token", choices=("k1", "k2", "k3", "ratio", "difference"))
    over: str = param(
        "sequence_mean",
        "unit that is kept or dropped, and the divergence that is compared: the token's, the mean over the turn's "
        "tokens, or the sum, mean or maximum over the sequence's tokens",
        choices=("token", "turn_mean", "sequence_sum", "sequence_mean", "sequence_max"),
    )
    low: float = param(-math.inf, "smallest divergence that is kept", "[-inf, inf)")
    high: float = param(..., "largest divergence that is kept", "(-inf, inf]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise ConfigError(f"{self.setting('low')}: it must be below high={self.high}")
        if self.by in ("k2", "k3", "ratio") and self.high < 0:
            raise ConfigError(
                f"{self.setting('high')}: by={self.by} is never negative, so everything would be dropped: set "
                "high to 0 or more"
            )
        if self.by == "difference" and self.over != "sequence_sum" and self.low <= -1 and self.high >= 1:
            raise ConfigError(
                f"{self.setting('high')}: with low={self.low} nothing is ever dropped, since probabilities differ "
                "by at most 1: set bounds between -1 and 1"
            )

    @property
    def by_token(self) -> bool:
        return self.over in ("token", "turn_mean")

    def keep(self, ages: Ages) -> Tensor:
        divergence = self._divergence(ages)
        if self.over == "token":
            return self._inside(divergence)
        spans = ages.view.turns() if self.over == "turn_mean" else ages.view.sequences
        gather = {"sum": spans.sum, "mean": spans.mean, "max": spans.max}[self.over.partition("_")[2]]
        return spans.spread(self._inside(gather(divergence)))

    def _divergence(self, ages: Ages) -> Tensor:
        log_w = ages.log_w
        if self.by == "difference":
            assert ages.behaviour is not None
            assert ages.proximal is not None
            return ages.proximal.exp() - ages.behaviour.exp()
        if self.by == "k1":
            return -log_w
        if self.by == "ratio":
            return log_w.exp()
        return log_w.square() / 2 if self.by == "k2" else log_w.expm1() - log_w

    def _inside(self, divergence: Tensor) -> Tensor:
        return (divergence >= self.low) & (divergence <= self.high)
