"""Computes statistics of scores within their groups, in float64. The tensors are small: one number per sequence or
step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The groups of n values. Value i belongs to the group `index[i]`; `index` is int64[n] in [0, count)."""

    index: Tensor
    count: int

    @classmethod
    def of(cls, index: Tensor) -> Groups:
        return cls(index, int(index.max()) + 1 if index.numel() else 0)

    def total(self, values: Tensor) -> Tensor:
        """float64[count]: the sum of each group."""
        result = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return result.index_add_(0, self.index, values.double())

    def sum(self, values: Tensor) -> Tensor:
        """float64[n]: for each value, the sum of its group."""
        return self.total(values)[self.index]

    def size(self) -> Tensor:
        """float64[n]: for each value, the number of values in its group."""
        return self.sum(torch.ones_like(self.index))

    def least(self, values: Tensor) -> Tensor:
        """float64[n]: for each value, the smallest value of its group."""
        return self._extreme(values, "amin")

    def greatest(self, values: Tensor) -> Tensor:
        """float64[n]: for each value, the largest value of its group."""
        return self._extreme(values, "amax")

    def centre(self, values: Tensor) -> Tensor:
        """float64[n]: value minus the group's mean; exactly 0 where all values of the group are equal."""
        above = values.double() - self.least(values)
        return above - self.sum(above) / self.size()

    def std(self, values: Tensor) -> Tensor:
        """float64[n]: for each value, the unbiased standard deviation of its group; 0 for a value alone in its
        group."""
        return (self.sum(self.centre(values).square()) / (self.size() - 1).clamp(min=1)).sqrt()

    def normalise(self, values: Tensor, by_std: bool) -> Tensor:
        """float64[n]: centred, and divided by std + 1e-6 if `by_std`. A value alone in its group is unchanged."""
        centred = self.centre(values)
        if by_std:
            centred = centred / (self.std(values) + EPSILON)
        return torch.where(self.size() == 1, values.double(), centred)

    def leave_one_out(self, values: Tensor) -> Tensor:
        """float64[n]: value minus the mean of its group's other values; 0 for a value alone in its group."""
        size = self.size()
        return self.centre(values) * size / (size - 1).clamp(min=1)

    def _extreme(self, values: Tensor, which: str) -> Tensor:
        result = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return result.scatter_reduce_(0, self.index, values.double(), which, include_self=False)[self.index]
