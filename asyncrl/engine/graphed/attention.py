"""Attention of a static pass: the packed tokens attend over the slots of the cache.

All indices and lengths are on the device, so the host waits for nothing. A token reads only the positions of its own
sequence. So other contents of a slot, even nan, have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.engine.cache import SlotCache
from asyncrl.engine.graphed.inputs import PassInputs

Attention = Callable[[Tensor, Tensor, Tensor, PassInputs, float], Tensor]
"""Computes outputs [N, heads, D] of query [N, heads, D] over the keys and values [slots, key-value heads, length, D]
of a layer, with the scale of the scores. The inputs of the pass have the slots, positions and tiles."""


@dataclass(frozen=True, slots=True, eq=False)
class StaticLayout:
    """The layout of a static pass. It takes the place of `engine.cache.Layout` in the model's attention."""

    cache: SlotCache
    inputs: PassInputs
    attention: Attention

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Write key and value [N, key-value heads, D] into the cache, and compute the outputs of the layer."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.transpose(1, 2)[self.inputs.slots, self.inputs.positions] = key
        values.transpose(1, 2)[self.inputs.slots, self.inputs.positions] = value
        return self.attention(query, keys, values, self.inputs, scale)


def attend_over_slots(query: Tensor, keys: Tensor, values: Tensor, inputs: PassInputs, scale: float) -> Tensor:
    """Compute attention (see `Attention`) in plain torch. This is slow: each token gets its own copy of its slot."""
    count, heads, dim = query.shape
    hidden = torch.arange(keys.shape[2], device=keys.device) > inputs.positions[:, None]
    # A masked key or value still enters a product, and the product of 0 and nan is nan.
    seen_keys, seen_values = (
        each[inputs.slots].masked_fill(hidden[:, None, :, None], 0).contiguous() for each in (keys, values)
    )
    folded = query.reshape(count, keys.shape[1], -1, dim)
    mask = ~hidden[:, None, None]
    output = scaled_dot_product_attention(folded, seen_keys, seen_values, attn_mask=mask, scale=scale)
    return output.reshape(count, heads, dim)
