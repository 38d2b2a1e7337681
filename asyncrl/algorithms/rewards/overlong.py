from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.parts import param
from asyncrl.algorithms.rewards.base import Reward
from asyncrl.errors import ConfigError


class Overlong(Reward):
    """A soft penalty on episodes whose policy tokens come close to the length limit.

    Formula: R + weight clamp((max_length - buffer - len) / buffer, -1, 0), with len the number of policy tokens
    Use: when episodes are cut off at a limit, so that the cut adds less noise to rewards
    Source: DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025
    Caveat: tokens of tool results do not count: choose max_length for the policy's own tokens.
    """

    name = "overlong"

    max_length: int = param(..., "number of policy tokens from which on the full penalty applies", "[1, inf)")
    buffer: int | None = param(
        None,
        "number of policy tokens before max_length over which the penalty grows from 0 to its full size; null: a fifth "
        "of max_length, as in the paper",
        "[1, inf)",
    )
    weight: float = param(1.0, "size of the full penalty", "[0, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer is not None and self.buffer > self.max_length:
            raise ConfigError(f"{self.setting('buffer')}: it must be at most max_length={self.max_length}")

    def __call__(self, episodes: Episodes) -> Tensor:
        buffer = self.buffer or max(1, self.max_length // 5)
        room = self.max_length - buffer - episodes.lengths.double()
        return episodes.reward + self.weight * (room / buffer).clamp(-1, 0)
