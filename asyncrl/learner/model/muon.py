"""Muon for matrices whose rows are on several ranks (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


class ShardedMuon(torch.optim.Optimizer):
    """Orthogonalises the momentum of each matrix, of which every rank keeps its own rows.

    The iteration that orthogonalises (Newton-Schulz) needs the whole matrix. Each rank gathers one matrix after the
    other and has torch's Muon compute the same update from it, so any number of ranks gives the same weights. Updates
    have the size of AdamW's (Liu et al. 2025, arXiv:2502.16982): a learning rate of AdamW suits Muon too.
    """

    def __init__(self, matrices: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        super().__init__(matrices, {"lr": 0.0, "momentum": 0.95, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient. `closure` is ignored."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, matrix: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        averaged = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        matrix.mul_(1 - lr * weight_decay).add_(_descent(matrix.grad.lerp(averaged, momentum)), alpha=lr)


def _descent(direction: Tensor) -> Tensor:
    """Return the change that torch's Muon makes to a matrix of zeros whose gradient is `direction`. The change is
    sharded as `direction` is."""
    whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
    update = nn.Parameter(torch.zeros_like(whole))
    update.grad = whole
    torch.optim.Muon(
        [update], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    ).step()
    if not isinstance(direction, DTensor):
        return update
    mesh = direction.device_mesh
    return DTensor.from_local(update.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
        mesh, direction.placements
    )
