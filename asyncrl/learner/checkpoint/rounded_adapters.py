"""Measures how much of what adapters have learned is left in the published weights.

Engines get one matrix W + D for each adapted matrix: the frozen matrix W, and the change D by its adapter. W is already
in the published dtype. So rounding W + D undoes a change that is smaller than half the distance between two numbers of
the dtype.

In bfloat16 half this distance is up to 1/256 of a weight. With a small learning rate, it takes many steps to change a
weight that much. Until then the engines sample from an older policy than the learner trains, since the learner computes
with the adapters themselves.
"""

from __future__ import annotations

import torch
from torch import nn

from asyncrl.learner.checkpoint.gathering import own_rows
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.adapters import low_rank_updates
from asyncrl.modelling.weight_format import model_tensors


@torch.no_grad()
def kept_share(model: nn.Module, dtype: torch.dtype, ranks: Ranks) -> float | None:
    """Return the share of the adapters' change that is left in `dtype`: the projection <R, D> / <D, D> over all adapted
    matrices, where R = round(W + D) - W. None: the model has no adapters, or they change nothing yet.

    1 means that rounding has no effect on average, and 0 that the published weights are those of the base model. All
    ranks call this.
    """
    tensors = model_tensors(model)
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for name, update in low_rank_updates(model).items():
        rows, is_shard = own_rows(tensors[name], ranks)
        merged, rows = update.added_to(rows, is_shard), rows.float()
        wanted, kept = merged - rows, merged.to(dtype).float() - rows
        # A matrix that all ranks have as a whole counts once.
        if ranks.is_in_first_copy if is_shard else ranks.rank == 0:
            sums += torch.stack([(kept * wanted).sum(), (wanted * wanted).sum()])
    kept_sum, whole = ranks.sum(sums.cpu()).tolist()
    return kept_sum / whole if whole else None
