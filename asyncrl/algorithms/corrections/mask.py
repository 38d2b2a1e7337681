from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, LevelCorrection
from asyncrl.algorithms.parts import param
from asyncrl.errors import ConfigError


class Mask(LevelCorrection):
    """Masked importance sampling (IcePop, MIS): importance weights within two bounds. Tokens outside are dropped.

    Formula: w = pi_prox / mu where low <= pi_prox / mu <= high, else the token is dropped; with the ratio over the span
    that `level` names
    Use: when training and inference engines disagree on some tokens, which truncation would keep
    Source: Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model, 2025
    Caveat: with low=0 and high=inf it is plain importance sampling.
    """

    name = "mask"
    weighs = True

    low: float = param(0.5, "smallest ratio that is kept", "[0, inf)")
    high: float = param(5.0, "largest ratio that is kept", "(0, inf]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise ConfigError(f"{self.setting('low')}: it must be below high={self.high}")

    def weigh(self, ages: Ages) -> Tensor:
        return self.ratio(ages)

    def keep(self, ages: Ages) -> Tensor:
        ratio = self.ratio(ages)
        return (ratio >= self.low) & (ratio <= self.high)
