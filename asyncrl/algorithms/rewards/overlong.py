from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.parts import param
from asyncrl.algorithms.rewards.base import Reward
from asyncrl.errors import ConfigError


class Overlong(Reward):
    """A soft penalty on episodes whose policy tokens come close to the length limit.

    Formula: R + weight clamp((max_length - buffer - len) / buffer, -1, 0), len in policy tokens
    Use: where episodes are cut off at a limit, so that the cut is not noise
    Source: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025
    Caveat: tool tokens do not count: choose max_length for what the policy itself writes.
    """

    name = "overlong"

    max_length: int = param(..., "policy tokens at which the whole penalty is due", "[1, inf)")
    buffer: int = param(..., "tokens before max_length at which it begins", "[1, inf)")
    weight: float = param(1.0, "the whole penalty", "[0, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer > self.max_length:
            raise ConfigError(f"{self.setting('buffer')}: it must be at most max_length={self.max_length}")

    def __call__(self, episodes: Episodes) -> Tensor:
        room = self.max_length - self.buffer - episodes.lengths.double()
        return episodes.reward + self.weight * (room / self.buffer).clamp(-1, 0)
