"""Histograms of ratios of probabilities, in bins that every pass and every rank shares, so that counts add up.

The middle bin is around 1. On each side of it a ratio's factor to or from 1 is squared from one bin to the next: it
ends at 2^(1/64), 2^(1/32), ..., 2, 4, and the outermost bins hold what is further off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

SIDE = 8
"""Bins on each side of the middle one."""
BINS = 2 * SIDE + 1
FINEST = math.log(2) / 64
"""The largest abs(log ratio) of the middle bin."""
RAW, CORRECTED = "ratio_bin", "weight_bin"
"""The counts of raw importance weights, which all policy tokens have, and of corrected ones, which kept tokens have."""


def bin_counts(log_ratio: Tensor) -> Tensor:
    """How many of log_ratio float[M] are in each bin: float64[BINS], on its device, without a wait for it. The log of 0
    is in the first bin."""
    far = (log_ratio.abs() / FINEST).log2().floor().clamp(-1, SIDE - 1) + 1
    # A log-ratio that is not finite must not count outside of the tensor.
    index = (SIDE + far * log_ratio.sign()).long().clamp(0, BINS - 1)
    ones = torch.ones_like(log_ratio, dtype=torch.float64)
    return ones.new_zeros(BINS).index_add_(0, index, ones)


def bin_edges() -> tuple[float, ...]:
    """The log-ratios between which the bins are: BINS + 1 values that rise. What is beyond the outer ones, which are
    those of 1/16 and 16, is counted within them."""
    side = [FINEST * 2**power for power in range(SIDE + 1)]
    return (*(-each for each in reversed(side)), *side)


def shares(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """The share of tokens in each bin that has any, as metrics `ratio_bin/I` and `weight_bin/I`."""
    found: dict[str, float] = {}
    for name in (RAW, CORRECTED):
        counts: Sequence[float] = sums[name].tolist() if name in sums else []
        found |= {f"{name}/{index}": count / sum(counts) for index, count in enumerate(counts) if count}
    return found
