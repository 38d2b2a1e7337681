"""What the processes of NCCL groups on one machine must agree on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from asyncrl.config.schema import TrainConfig


def agree_with_servers(config: TrainConfig) -> None:
    """Have NCCL in this process go without cuMem, as SGLang does, where an actor brings weights to its servers by NCCL.

    Whoever else is in a group with that actor must do the same. Call it before the first group; what the environment
    says already stays.
    """
    weights = config.weights
    by_nccl = torch.device(weights.staging).type == "cuda" and "distributed" in weights.transports
    if config.engine.kind != "embedded" and by_nccl:
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
