"""Distances between two policies that need only the probability of the sampled token.

They compare two outcomes: the sampled token, and all other tokens together.
"""

from __future__ import annotations

from torch import Tensor

EDGE = 1e-7
"""Probabilities are clamped to [EDGE, 1 - EDGE], where float32 can still tell them from 0 and 1."""


def binary_kl(first: Tensor, second: Tensor) -> Tensor:
    """float[M]: the KL between Bernoulli distributions with the clamped probabilities `first` and `second`, both
    float[M]."""
    p, q = first.clamp(EDGE, 1 - EDGE), second.clamp(EDGE, 1 - EDGE)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
