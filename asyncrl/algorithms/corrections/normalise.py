from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction


class Normalise(Correction):
    """Divides the weights by their mean over the global batch. Dropped tokens count as weight 0 in the mean.

    Formula: w = w / m, m the mean of w over all N policy tokens, with w = 0 for dropped tokens; if w is the same for a
    whole sequence (level sequence or geometric), m is the mean over the S sequences of each sequence's mean
    Use: after truncate or mask, so that the correction does not change the size of the step
    Source: self-normalised importance sampling; Monte Carlo theory, methods and examples, 2013
    Caveat: if an earlier correction drops tokens, the remaining tokens get larger weights, which are very large if few
    remain. Later corrections only drop tokens, and do not change the weights again. verl and slime normalise before
    they reject.
    """

    name = "normalise"
    whole_batch = True

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
