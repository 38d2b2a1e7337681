from __future__ import annotations

import math

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.parts import param
from asyncrl.errors import ConfigError


class Reject(Correction):
    """Drops tokens, or whole sequences, whose divergence between behaviour and proximal policy lies outside two bounds.
    It sets no weights.

    Formula: k1 = -log w, k2 = log^2 w / 2, k3 = w - 1 - log w, ratio = w, with w = pi_prox / mu; keep if low <= k <=
    high
    Use: trust regions on the data; for long episodes over the mean of a sequence
    Source: Trust Region Masking for Long-Horizon LLM Reinforcement Learning, 2025
    Caveat: k1 has a sign, so set both bounds; k2 and k3 are never negative.
    """

    name = "reject"

    by: str = param("k3", "the divergence of a token", choices=("k1", "k2", "k3", "ratio"))
    over: str = param(
        "sequence_mean",
        "what is judged: the token, or the sequence by its tokens' sum, mean or maximum",
        choices=("token", "sequence_sum", "sequence_mean", "sequence_max"),
    )
    low: float = param(-math.inf, "smallest divergence that is kept", "[-inf, inf)")
    high: float = param(..., "largest divergence that is kept", "(-inf, inf]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise ConfigError(f"{self.setting('low')}: it must be below high={self.high}")

    @property
    def by_token(self) -> bool:
        return self.over == "token"

    def keep(self, ages: Ages) -> Tensor:
        divergence, spans = self._divergence(ages.log_w), ages.view.sequences
        if self.over == "token":
            return self._inside(divergence)
        gather = {"sequence_sum": spans.sum, "sequence_mean": spans.mean, "sequence_max": spans.max}[self.over]
        return spans.spread(self._inside(gather(divergence)))

    def _divergence(self, log_w: Tensor) -> Tensor:
        if self.by == "k1":
            return -log_w
        if self.by == "ratio":
            return log_w.exp()
        return log_w.square() / 2 if self.by == "k2" else log_w.expm1() - log_w

    def _inside(self, divergence: Tensor) -> Tensor:
        return (divergence >= self.low) & (divergence <= self.high)
