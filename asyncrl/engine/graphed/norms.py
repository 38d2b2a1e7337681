"""Computes the RMS norms of a Hugging Face model by torch's fused kernel: one kernel in place of eight."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from asyncrl.modelling.routers import extend

_TOLERANCE = 1e-5


def fuse_norms(model: nn.Module) -> None:
    """Fuse the norms that compute what torch's `rms_norm` computes. One norm of each class is first compared with
    `rms_norm` in float32."""
    norms: dict[type, list[nn.Module]] = {}
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            norms.setdefault(type(module), []).append(module)
    for group in norms.values():
        if _is_usual(group[0]):
            extend(group, _Fused)


def _is_usual(norm: Any) -> bool:
    if not hasattr(norm, "variance_epsilon") or norm.weight.ndim != 1:
        return False
    trial = deepcopy(norm).float()
    width = len(trial.weight)
    trial.weight.data = torch.linspace(-1, 2, width, device=trial.weight.device)
    states = torch.linspace(-3, 5, 2 * width, device=trial.weight.device).view(2, width)
    fused = rms_norm(states, (width,), trial.weight, norm.variance_epsilon)
    return torch.allclose(trial(states), fused, atol=_TOLERANCE, rtol=_TOLERANCE)


class _Fused:
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.variance_epsilon)
