"""Importance weights of mean one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction


@dataclass(frozen=True, kw_only=True)
class Normalise(Correction):
    """Divides the weights by their mean over the global batch.

    Formula: w = w / mean of w over the tokens not yet dropped
    Use: after truncate or mask, so that the correction does not change the step's size
    Source: self-normalised importance sampling; Monte Carlo theory, methods and examples, 2013
    Caveat: tokens that later rules drop still count in the mean; put it last.
    """

    name: ClassVar[str] = "normalise"
    whole_batch: ClassVar[bool] = True

    def weigh(self, ages: Ages) -> Tensor:
        assert ages.reduce is not None
        assert ages.weights is not None
        kept = ages.kept(ages.weights).sum().double()
        number = ages.kept(torch.ones_like(ages.weights)).sum().double()
        total, count = ages.reduce(torch.stack([kept, number]))
        return ages.weights if total == 0 else ages.weights * (count / total).to(ages.weights.dtype)
