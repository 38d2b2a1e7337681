"""Importance weights of mean one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction


@dataclass(frozen=True, kw_only=True)
class Normalise(Correction):
    """Divides the weights by their mean over the global batch, in which a dropped token counts with weight 0.

    Formula: w = w / m, m the mean over all N policy tokens of w, 0 where dropped; where w is one a sequence (level
    sequence or geometric), m is the mean over the S sequences of each sequence's own mean
    Use: after truncate or mask, so that the correction does not change the step's size
    Source: self-normalised importance sampling; Monte Carlo theory, methods and examples, 2013
    Caveat: if a correction before it drops tokens, the remaining tokens get larger weights; drops after it change no
    weights. verl and slime normalise before they reject. If few tokens are kept, they weigh much.
    """

    name: ClassVar[str] = "normalise"
    whole_batch: ClassVar[bool] = True

    def weigh(self, ages: Ages) -> Tensor:
        assert ages.reduce is not None
        assert ages.weights is not None
        kept, spans = ages.kept(ages.weights), ages.view.sequences
        if ages.weighs_sequences:
            sums = torch.stack([spans.mean(kept).sum(), (spans.lengths > 0).sum().double()])
        else:
            total = kept.sum(dtype=torch.float64)
            sums = torch.stack([total, total.new_tensor(kept.numel())])
        total, count = ages.reduce(sums)
        return ages.weights if total == 0 else ages.weights * (count / total).to(ages.weights.dtype)
