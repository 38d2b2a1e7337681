"""Finds exact thresholds over the values of the whole batch, such as the smallest of the k largest values. The
thresholds are the same for any number of ranks.

The threshold is found by counting, without a sort over all ranks of the learner. The bits of a float32 value give its
place in the order. Three successively finer histograms of 2,048 bins are summed over the ranks. The histograms give the
exact value at which a condition on the smallest values first becomes true.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Reduce

_BITS = 11
_BINS = 1 << _BITS

Condition = Callable[[Tensor, Tensor], Tensor]
"""A condition on the smallest values. Its arguments are float64[bins] each: the count and the sum of all values up to
the end of each bin. It returns bool[bins], and once it is true, it must be true for all later bins."""


def order(values: Tensor) -> Tensor:
    """int64[M]: a key in [0, 2^32) for each value. Keys have the same order as the values in float32, and -0 has the
    same key as 0."""
    bits = (values.float() + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, -1 - bits, bits + (1 << 31))


def threshold(values: Tensor, condition: Condition, reduce: Reduce) -> int:
    """The smallest key for which `condition` is true of the count and sum of all values with keys up to it. 2^32 if
    there is no such key."""
    # The histograms are made on the CPU: the host must wait for each of them anyway, and a GPU would round the sums
    # differently in each run.
    keys, values = order(values).cpu(), values.detach().cpu()
    before = torch.zeros(2, 1, dtype=torch.float64)
    prefix = 0
    for shift in (2 * _BITS, _BITS, 0):
        inside = (keys >> (shift + _BITS)) == prefix
        keys, values = keys[inside], values[inside]
        bins = (keys >> shift) & (_BINS - 1)
        upto = before + reduce(torch.stack([_count(bins), _count(bins, values)])).cumsum(1)
        reached = condition(upto[0], upto[1]) & (upto[0] > 0)
        if shift < 2 * _BITS:
            # The coarser histogram has shown that the condition becomes true within these bins. In the sums of this
            # finer histogram, rounding may hide that.
            reached[-1] = True
        if not bool(reached[-1]):
            return 1 << 32
        found = int(reached.int().argmax())
        before = upto[:, found - 1 : found] if found else before
        prefix = prefix * _BINS + found
    return prefix


def top(values: Tensor, count: int, reduce: Reduce) -> Tensor:
    """bool[M]: true for the `count` largest values of the global batch, and for values equal to the smallest of
    these."""
    total = reduce(torch.tensor([values.numel()], dtype=torch.float64))
    cut = threshold(values, lambda seen, _: seen > total - count, reduce)
    return order(values) >= cut


def quantile(values: Tensor, share: float, reduce: Reduce) -> float:
    """The smallest value of the global batch, in float32, such that at least `share` of all values are no larger. 0 for
    an empty batch."""
    total = reduce(torch.tensor([values.numel()], dtype=torch.float64))
    key = threshold(values, lambda seen, _: seen >= share * total, reduce)
    if not float(total):
        return 0.0
    bits = key - (1 << 31) if key >> 31 else -1 - key
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


def draw(sequence: Tensor, position: Tensor, salt: int) -> Tensor:
    """float32[M]: pseudo-random numbers, uniform in [0, 1) with 24 bits, from int64[M] indices. A token's number does
    not depend on the learner's rank. Another `salt` gives other numbers."""
    mixed = sequence * 0x3C6EF372 + position * 0x1B873593 + (salt + 1) * 0x2545F491
    for _ in range(3):
        mixed = (mixed & 0x7FFFFFFF) * 0x45D9F3B
        mixed = mixed ^ (mixed >> 17)
    return (mixed & 0xFFFFFF) / float(1 << 24)


def _count(keys: Tensor, values: Tensor | None = None) -> Tensor:
    return torch.bincount(keys, None if values is None else values.double(), minlength=_BINS).double()
