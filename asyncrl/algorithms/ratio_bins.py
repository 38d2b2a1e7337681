"""Counts ratios of probabilities in bins. All passes and ranks use the same bins, so that counts can be added.

The middle bin contains 1 and ends at 2^(1/64). The bins above it end at 2^(1/32), ..., 4, 16: each end is the square
of the previous end. The bins below 1 mirror them. The outermost bins also count all ratios beyond their ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

SIDE = 8
"""The number of bins on each side of the middle bin."""
BINS = 2 * SIDE + 1
FINEST = math.log(2) / 64
"""The largest abs(log ratio) in the middle bin."""
RAW, CORRECTED = "ratio_bin", "weight_bin"
"""The names of the counts: for the raw importance weights of all policy tokens that no grammar restricted, and for the
corrected weights of the kept tokens."""


def bin_counts(log_ratio: Tensor) -> Tensor:
    """float64[BINS], on the same device: how many entries of log_ratio float[M] are in each bin. -inf is in the first
    bin."""
    # No operation here makes the host wait for a GPU.
    far = (log_ratio.abs() / FINEST).log2().floor().clamp(-1, SIDE - 1) + 1
    # The clamp makes the index valid even if a log-ratio is not finite.
    index = (SIDE + far * log_ratio.sign()).long().clamp(0, BINS - 1)
    ones = torch.ones_like(log_ratio, dtype=torch.float64)
    return ones.new_zeros(BINS).index_add_(0, index, ones)


def bin_edges() -> tuple[float, ...]:
    """The edges of the bins as log-ratios: BINS + 1 rising values, from log(1/16) to log(16).

    The outermost bins also count the ratios beyond the first and the last edge.
    """
    side = [FINEST * 2**power for power in range(SIDE + 1)]
    return (*(-each for each in reversed(side)), *side)


def shares(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The share of tokens in each non-empty bin, as metrics `ratio_bin/I` and `weight_bin/I`."""
    found: dict[str, float] = {}
    for name in (RAW, CORRECTED):
        counts: Sequence[float] = sums[name].tolist() if name in sums else []
        found |= {f"{name}/{index}": count / sum(counts) for index, count in enumerate(counts) if count}
    return found
