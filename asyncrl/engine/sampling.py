"""Samples one token for each row, reproducibly: the noise depends only on the request and the position.

A row takes the first token at which its cumulative probability exceeds a uniform random number (inverse transform
sampling). This number is a hash of the request's key and the sampled position. So it depends neither on the rest of the
batch nor on the order of requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def request_key(seed: int, session: str) -> int:
    """The 64-bit key of all random numbers of `session`."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{session}".encode(), digest_size=8).digest(), "little")


def request_seed(seed: int, session: str) -> int:
    """The first 31 bits of `request_key`, for servers whose seeds are signed integers."""
    return request_key(seed, session) >> 33


def uniforms(
    keys: Sequence[int] | NDArray[np.uint64], positions: Sequence[int] | NDArray[np.int64]
) -> NDArray[np.float64]:
    """A number in (0, 1) for each pair of key and position.

    The number is the output of SplitMix64 (Steele, Lea and Flood 2014) at step `position` from state `key`. Only 48
    bits are used, so that rounding cannot reach 0 or 1.
    """
    state = np.array(keys, np.uint64) + np.array(positions, np.uint64) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    numbers: NDArray[np.float64] = ((state >> np.uint64(16)) + 0.5) * 2.0**-48
    return numbers


def sample(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens int64[B] and logprobs float32[B], from logits [B, V], temperature float32[B], uniform float64[B].

    Temperature 0 takes the largest logit. Log-probs are of logits / temperature, and at temperature 0 of the unscaled
    logits.
    """
    greedy = temperature == 0
    logprobs = (logits.float() / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    passed = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
    # If the logits are not finite, no cumulative probability exceeds the random number. The log-prob is then not finite
    # either.
    tokens = torch.where(greedy, logits.argmax(-1), passed.clamp(max=logits.shape[-1] - 1))
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def most_likely(logits: torch.Tensor, temperature: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most likely tokens int64[B, k] of each row, the most likely first, and their logprobs as in
    `sample`."""
    scaled = logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None]
    logprobs, tokens = scaled.log_softmax(-1).topk(min(count, logits.shape[-1]))
    return tokens, logprobs
