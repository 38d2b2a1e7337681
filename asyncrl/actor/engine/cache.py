"""Keys and values of a fixed number of slots, and the attention of a Hugging Face decoder over them.

One forward pass takes N packed tokens [1, N]: first the decoding slots with one token each, then chunks of prompts. The
model's own modules do everything but attention, which arrives here through transformers' attention interface with the
`Layout` of the pass: it writes the new keys and values into their slots and attends over what each slot holds. The
decoding slots attend together, over a view of the cache that is as long as the longest of them; chunks attend one by
one. Nothing is copied out of the cache and no prompt is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.errors import EngineError

ATTENTION = "asyncrl_slots"
_ALIGNMENT = 16
_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens [start, end) of the sequence in `slot`; those before `start` are in the cache already."""

    slot: int
    start: int
    end: int


class SlotCache:
    """The tensors: for each layer, keys and values [slots, key-value heads, length, head dim].

    They start as zeros, because what a mask hides still enters the products with weight 0 and so must be finite.
    """

    def __init__(self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (slots, config.num_key_value_heads, _aligned(length), head_dim)
        self.length = length
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def wipe(self, slot: int) -> None:
        """Forget one slot's numbers, which is needed only where they may not be finite."""
        for tensor in (*self.keys, *self.values):
            tensor[slot].zero_()


class Layout:
    """Where the packed tokens of one forward pass lie in `cache`, and what each of them may see.

    `chunks` must start with those of one token. `slots` and `positions` are int64[N]; `last` int64[len(chunks)] is the
    index of each chunk's last token among the N.
    """

    def __init__(self, cache: SlotCache, chunks: Sequence[Chunk]) -> None:
        device, dtype = cache.keys[0].device, cache.keys[0].dtype
        counts = np.array([chunk.end - chunk.start for chunk in chunks])
        ends = np.cumsum(counts)
        starts = np.array([chunk.start for chunk in chunks])
        slots = np.array([chunk.slot for chunk in chunks])
        self._cache = cache
        self.slots = torch.from_numpy(np.repeat(slots, counts)).to(device)
        self.positions = torch.from_numpy(np.arange(ends[-1]) + np.repeat(starts - ends + counts, counts)).to(device)
        self.last = torch.from_numpy(ends - 1).to(device)
        self.layers_seen: set[int] = set()

        self._decoding = int((counts == 1).sum())
        if self._decoding:
            rows, seen = slots[: self._decoding], starts[: self._decoding] + 1
            # A slot below the highest that decodes nothing now sees its first position, so that its softmax is defined.
            lengths = np.ones(rows.max() + 1, np.int64)
            lengths[rows] = seen
            self._mask = _hidden(torch.from_numpy(lengths)[:, None], _aligned(seen.max()), dtype)[:, None, None].to(
                device
            )
        self._chunks = [
            (chunk, int(end), _hidden(torch.arange(chunk.start, chunk.end)[:, None] + 1, chunk.end, dtype).to(device))
            for chunk, end in zip(chunks[self._decoding :], ends[self._decoding :], strict=True)
        ]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """query [N, heads, D], key and value [N, key-value heads, D] of the packed tokens to outputs [N, heads, D]."""
        self.layers_seen.add(layer)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.transpose(1, 2)[self.slots, self.positions] = key
        values.transpose(1, 2)[self.slots, self.positions] = value
        outputs = []
        if self._decoding:
            outputs.append(self._decode(query[: self._decoding], keys, values, scaling))
        outputs += [
            _attend_chunk(
                query[end - (chunk.end - chunk.start) : end], keys[chunk.slot], values[chunk.slot], mask, scaling
            )
            for chunk, end, mask in self._chunks
        ]
        return torch.cat(outputs)

    def _decode(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
        slots, heads, dim = self._mask.shape[0], *query.shape[1:]
        length = self._mask.shape[-1]
        rows = self.slots[: self._decoding]
        spread = query.new_zeros(slots, heads, dim).index_copy_(0, rows, query)
        # The query heads of one key-value head stand as positions, so that each key and value is read once.
        out = scaled_dot_product_attention(
            spread.view(slots, keys.shape[1], -1, dim),
            keys[:slots, :, :length],
            values[:slots, :, :length],
            attn_mask=self._mask,
            scale=scaling,
        )
        return out.reshape(slots, heads, dim)[rows]


def _hidden(lengths: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """An additive mask [R, width] from lengths int64[R, 1]: 0 where a row may look, -inf at its length and after."""
    return torch.zeros(len(lengths), width, dtype=dtype).masked_fill_(torch.arange(width) >= lengths, -torch.inf)


def _attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """query [C, heads, D] over keys and values [key-value heads, length, D] of its slot to outputs [C, heads, D]."""
    (count, heads, dim), end = query.shape, mask.shape[-1]
    groups = heads // keys.shape[0]
    out = scaled_dot_product_attention(
        query.transpose(0, 1).reshape(-1, groups, count, dim),
        keys[:, None, :end].expand(-1, groups, -1, -1),
        values[:, None, :end].expand(-1, groups, -1, -1),
        attn_mask=mask,
        scale=scaling,
    )
    return out.reshape(heads, count, dim).transpose(0, 1)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    layout: Layout,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in place of its own attention; see its AttentionInterface for the arguments."""
    refused = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    window = kwargs.get("sliding_window")
    if refused or (window is not None and window < layout.length):
        raise EngineError(
            f"the embedded engine has plain full attention only; this model asks for {refused or 'a sliding window'}"
        )
    out = layout.attend(int(module.layer_idx), *(x[0].transpose(0, 1) for x in (query, key, value)), scaling)  # type: ignore[arg-type]
    return out[None], None
