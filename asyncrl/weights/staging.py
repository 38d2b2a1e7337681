"""Where the actor of a fleet holds the version that its servers are getting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config.schema import WeightsConfig

CPU = torch.device("cpu")


def staging_device(weights: WeightsConfig) -> torch.device:
    """The device of `weights.staging`. Raises ConfigError: this machine has no such GPU."""
    device = torch.device(weights.staging)
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigError(f"weights.staging={weights.staging}: torch sees {found} GPUs here; name one of them, or cpu")
    return torch.device("cuda", index)


def staged(tensors: Mapping[str, torch.Tensor], device: torch.device) -> Mapping[str, torch.Tensor]:
    """The tensors on `device`: copies, but of those that are there already."""
    return {name: tensor.detach().to(device) for name, tensor in tensors.items()}
