"""Makes the routers of a mixture of experts send tokens to the experts that the rollout used.

A router's own forward gives its logits and its choice of experts. If the engine's experts are known, they replace that
choice. The weights of the experts are always computed from the router's own logits, by the family's rule, so that
gradients reach the router. If both choices are equal, the results are the same bit for bit.

Each router keeps the experts of a pass until the next one, so that a layer that is recomputed in the backward pass uses
them again. The experts are not arguments of the layers, since torch.compile would make a graph for each number of
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.modelling.routers import extend
from asyncrl.modelling.routing import RoutingShape, routers_of, routing_shape, weights_at

REPLAYED, CHANGED, CHOICES, REFUSED = (f"routing/{name}" for name in ("replayed", "changed", "choices", "refused"))
TOKENS = "routing/tokens"


class RoutingReplay:
    """The routers of the Hugging Face `model`, whose layers are neither sharded nor compiled yet.

    Raises ConfigError: experts of its family cannot be replayed.
    """

    def __init__(self, model: Any) -> None:
        self.shape: RoutingShape = routing_shape(model.config)
        family = model.config.get_text_config().model_type
        layers = list(model.get_decoder().layers)
        routers: list[Any] = [router for layer in layers for router in routers_of(layer, model.config)]
        if len(routers) != len(self.shape.layers) or len(layers) != self.shape.depth:
            raise ConfigError(
                f"the experts of this {family} model cannot be replayed: it has {len(routers)} routers, and its "
                f"configuration {len(self.shape.layers)}"
            )
        self._routers = routers
        for router in routers:
            router.replayed = None
            router.changed = None
            router.weigh = weights_at(family)
        extend(routers, _Replaying)

    def begin(self, packed: PackedSequences) -> None:
        """Begin the pass `packed`, whose tokens go to the experts that its `routing` names."""
        rows, shape = packed.computed_routing, self.shape
        if rows is None:
            for router in self._routers:
                router.replayed = None
            return
        known = (rows != 255).any(1)
        numbers = rows.view(len(rows), len(shape.layers), shape.top_k, shape.dtype.itemsize).to(torch.int32)
        experts = numbers[..., 0] if shape.dtype.itemsize == 1 else numbers[..., 0] + 256 * numbers[..., 1]
        experts = experts.masked_fill(~known[:, None, None], -1)
        for router, own in zip(self._routers, experts.unbind(1), strict=True):
            router.replayed = own.contiguous()

    def sums(self, packed: PackedSequences) -> dict[str, Tensor]:
        """Count the last forward pass, whose tokens were `packed`.

        The counts are all tokens, the replayed tokens, the replayed pairs (token, layer), and the pairs for which the
        engine's experts differ from the router's. If ranks divide the tokens, each rank gets the counts over all ranks.
        """
        count = int(packed.layout.bounds[0, -1])
        tokens = packed.ids.new_tensor(count)
        if packed.routing is None:
            return {TOKENS: tokens}
        replayed = (packed.routing != 255).any(1).sum()
        changed = torch.stack([router.changed for router in self._routers]).sum()
        if packed.part is not None:
            changed = packed.part.group.sum(changed)
        return {
            TOKENS: tokens,
            REPLAYED: replayed,
            CHOICES: replayed * len(self._routers),
            CHANGED: changed,
        }


def replay_summary(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics of replayed experts from the sums of all ranks. There are none if no experts are replayed."""
    get = {name: float(sums.get(name, 0.0)) for name in (TOKENS, REPLAYED, CHOICES, CHANGED, REFUSED)}
    if not get[TOKENS]:
        return {}
    return {
        REPLAYED: get[REPLAYED] / get[TOKENS],
        CHANGED: get[CHANGED] / max(1.0, get[CHOICES]),
        REFUSED: get[REFUSED],
    }


class _Replaying:
    """A router that sends tokens to the experts `replayed` [T, top_k], where these are not -1."""

    replayed: Tensor | None
    changed: Tensor | None
    weigh: Callable[[Any, Tensor, Tensor], Tensor]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, experts], and for each token the weights and the indices [T, top_k] of its experts, as the
        router does."""
        logits, own_weights, own = super().forward(*args, **kwargs)  # type: ignore[misc]
        replayed = self.replayed
        if replayed is None:
            return logits, own_weights, own
        known = replayed[:, :1] >= 0
        experts = torch.where(known, replayed.to(own.dtype), own)
        # A layer that is recomputed in the backward pass finds the same number again.
        self.changed = (experts.sort(-1).values != own.sort(-1).values).any(-1).sum().detach()
        return logits, self.weigh(self, logits, experts).to(own_weights.dtype), experts
