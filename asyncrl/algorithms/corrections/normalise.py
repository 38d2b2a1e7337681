from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.corrections.base import Ages, Correction


class Normalise(Correction):
    """Divides the weights by their mean over the global batch. Dropped tokens count as weight 0 in the mean.

    Formula: w / m, with w the weights so far, and m their mean over all policy tokens of the batch, where w = 0 for
    dropped tokens. If w is the same for all tokens of a sequence (level sequence or geometric), each sequence counts
    equally in m
    Use: after truncate or mask, so that the correction does not change the size of the step
    Source: self-normalised importance sampling; Monte Carlo theory, methods and examples, 2013
    Caveat: if an earlier correction drops tokens, the remaining tokens get larger weights, and very large ones if few
    tokens remain. Tokens that later corrections drop do not change the weights again. opsm drops tokens during the
    updates, so it must come later. verl and slime normalise before they drop tokens.
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
