"""The experts that an engine chose for each token of a mixture of experts, recorded for the learner.

Each layer with a router sends a token to `top_k` of its experts. Engine and learner round differently, so they send
some tokens to different experts, although both have the same weights. Such a different choice changes log-probs far
more than rounding itself. Training with the engine's choice of experts avoids the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.errors import ConfigError

Weigh = Callable[[nn.Module, Tensor, Tensor], Tensor]


class RoutedTokens(NamedTuple):
    """The experts of the tokens [start, start + R) of a sequence, as rows uint8[R, W] that a `RoutingShape` has
    packed."""

    start: int
    rows: NDArray[np.uint8]

    @property
    def end(self) -> int:
        return self.start + len(self.rows)


class RoutingError(ValueError):
    """The routed experts do not fit this model."""


@dataclass(frozen=True)
class RoutingShape:
    """The routers of a model with `depth` layers. Each layer in `layers` has a router, which chooses `top_k` of the
    layer's `experts` experts for a token.

    A token's experts are packed into one row of `width` bytes: the indices of `top_k` experts for each layer in
    `layers`. An index has one byte, or for more than 255 experts two bytes (little-endian). If a token's experts are
    unknown, all its bytes are 255.
    """

    layers: tuple[int, ...]
    depth: int
    experts: int
    top_k: int

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.experts <= 255 else "<u2")

    @property
    def width(self) -> int:
        """The number of bytes for a token."""
        return len(self.layers) * self.top_k * self.dtype.itemsize

    def missing(self, count: int) -> NDArray[np.uint8]:
        """Rows uint8[count, width] for tokens whose experts are unknown."""
        return np.full((count, self.width), 255, np.uint8)

    def pack(self, experts: NDArray[Any]) -> NDArray[np.uint8]:
        """Pack the experts int[T, layers with a router, top_k] into rows uint8[T, width]."""
        packed = np.ascontiguousarray(experts, self.dtype).reshape(len(experts), len(self.layers) * self.top_k)
        return packed.view(np.uint8)

    def unpack(self, rows: NDArray[np.uint8]) -> NDArray[np.int16] | NDArray[np.int32]:
        """Unpack rows uint8[T, width] into experts [T, layers with a router, top_k]; unknown experts are -1.

        The result is int16, or int32 for more than 255 experts. Raises RoutingError: rows have another width, an
        expert's index is too high, or a layer sends a token to the same expert twice.
        """
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise RoutingError(
                f"experts take {list(rows.shape)[1:]} bytes a token; for the model it must be {self.width}"
            )
        packed = np.ascontiguousarray(rows).view(self.dtype)
        known = (rows != 255).any(1)
        found: Any = packed.astype(np.int16 if self.dtype.itemsize == 1 else np.int32)
        found = found.reshape(len(rows), len(self.layers), self.top_k)
        found[~known] = -1
        self.check(found[known])
        return found  # type: ignore[no-any-return]

    def check(self, experts: NDArray[Any]) -> None:
        """Raises RoutingError: an index in experts [T, layers, top_k] is out of range, or a layer sends a token to one
        expert twice."""
        if not experts.size:
            return
        if experts.min() < 0 or experts.max() >= self.experts:
            raise RoutingError(
                f"experts are numbered from {experts.min()} to {experts.max()}; the model has {self.experts}"
            )
        ordered = np.sort(experts, -1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise RoutingError("a layer sends a token to one expert twice")


def routing_shape(config: Any) -> RoutingShape:
    """The routers of models of this Hugging Face configuration. Raises ConfigError: the model is not a mixture of
    experts, or its experts cannot be replayed."""
    config = config.get_text_config()
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ConfigError(
            f"the experts of a {config.model_type} model cannot be replayed; supported families are "
            f"{', '.join(sorted(FAMILIES))}; leave out engine.return_routed_experts and learner.router_replay"
        )
    depth = int(config.num_hidden_layers)
    layers = tuple(layer for layer in range(depth) if family.routes(config, layer))
    if not layers:
        raise ConfigError("no layer of this model has experts that could be replayed")
    return RoutingShape(layers, depth, family.experts(config), int(config.num_experts_per_tok))


def routers_of(model: nn.Module, config: Any) -> list[nn.Module]:
    """The routers of `model` in the order of its layers."""
    name = FAMILIES[config.get_text_config().model_type].router
    return [module for module in model.modules() if type(module).__name__ == name]


def weights_at(family: str) -> Weigh:
    """Returns a function that maps a router, its logits [T, experts] and experts int64[T, top_k] to the experts'
    weights [T, top_k].

    If the experts are the router's own choice, the weights equal those of its forward pass bit for bit.
    """
    return FAMILIES[family].weigh


@dataclass(frozen=True)
class _Family:
    """The routers of a family of models.

    - `router`: the name of their class
    - `weigh`: see `weights_at`
    - `routes(config, layer)`: true if the layer has a router
    - `experts(config)`: the number of experts in a layer
    """

    router: str
    weigh: Weigh
    routes: Callable[[Any, int], bool]
    experts: Callable[[Any], int]


def _softmax(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    chosen = logits.softmax(-1, dtype=torch.float).gather(-1, experts)
    if router.norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen.to(logits.dtype)


def _mixtral(_: Any, logits: Tensor, experts: Tensor) -> Tensor:
    chosen = logits.float().softmax(-1).gather(-1, experts)
    return chosen / chosen.sum(-1, keepdim=True)


def _sigmoid(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    chosen = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    weights: Tensor = chosen * router.routed_scaling_factor
    return weights


def _sparse_steps(config: Any, layer: int) -> bool:
    return layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0


def _behind_dense(config: Any, layer: int) -> bool:
    return layer >= int(config.first_k_dense_replace)


FAMILIES: Mapping[str, _Family] = {
    "qwen3_moe": _Family("Qwen3MoeTopKRouter", _softmax, _sparse_steps, lambda config: config.num_experts),
    "mixtral": _Family("MixtralTopKRouter", _mixtral, lambda *_: True, lambda config: config.num_local_experts),
    "olmoe": _Family("OlmoeTopKRouter", _softmax, lambda *_: True, lambda config: config.num_experts),
    "glm4_moe": _Family("Glm4MoeTopkRouter", _sigmoid, _behind_dense, lambda config: config.n_routed_experts),
}
"""Maps the `model_type` of a configuration to the family."""
