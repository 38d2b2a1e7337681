"""Records the experts that a model's routers choose in its forward passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.modelling.routing import routers_of, routing_shape


class RouterWatch:
    """Watches the routers of the Hugging Face `model` from now on. Raises ConfigError: see `routing_shape`."""

    def __init__(self, model: Any) -> None:
        self.shape = routing_shape(model.config)
        self._chosen: list[Tensor] = []
        for router in routers_of(model, model.config):
            router.register_forward_hook(lambda _, __, output: self._chosen.append(output[2]))

    def take(self) -> list[NDArray[np.uint8]]:
        """Return the experts of each token of the last pass, packed into a row of bytes for each token; [] if there was
        no pass since the last call."""
        chosen, self._chosen = self._chosen, []
        return list(self.shape.pack(torch.stack(chosen, 1).cpu().numpy())) if chosen else []
