"""Keys and values of a fixed number of slots, and the attention of a Hugging Face decoder over them.

A forward pass takes N packed tokens [1, N]: first the slots that decode, one token each, then chunks of prompts. The
model's own modules do everything but attention, which comes here through transformers' attention interface together
with the `Layout` of the pass. It writes the new keys and values into their slots; then the decoding slots attend
together, over a view of the cache as long as the longest of them, and the chunks one by one. Nothing is copied out of
the cache, and no prompt is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.actor.engine.scheduler import Chunk
from asyncrl.errors import ConfigError

_NAME = "asyncrl_slots"
_UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")


class SlotCache:
    """The tensors: for each layer, keys and values [slots, key-value heads, length, D].

    They start as zeros: what a mask hides still enters a product, with weight 0, and so must be finite.
    """

    def __init__(self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (slots, config.num_key_value_heads, length, head_dim)
        self.length = length
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]

    def wipe(self, slot: int) -> None:
        """Zero one slot, which is needed only where its numbers may not be finite."""
        for tensor in (*self.keys, *self.values):
            tensor[slot].zero_()


class Layout:
    """Where the N packed tokens of one pass lie in the cache, and what each of them sees.

    `chunks` start with those of one token. `positions` is int64[1, N], on the device; `last` is a numpy int64 array,
    the index among the N of each chunk's last token.
    """

    def __init__(self, cache: SlotCache, chunks: Sequence[Chunk]) -> None:
        slots, starts, stops = np.array(chunks, np.int64).T
        counts = stops - starts
        ends = counts.cumsum()
        self.cache = cache
        self.last = ends - 1
        self.layers_seen: set[int] = set()
        self._slots = self._tensor(slots.repeat(counts))
        self.positions = self._tensor(np.arange(ends[-1]) - (ends - stops).repeat(counts))[None]
        self._decoding = int((counts == 1).sum())
        if self._decoding:
            # A slot that decodes nothing now, but lies below one that does, sees one position: no softmax over nothing.
            seen = np.ones(slots[: self._decoding].max() + 1, np.int64)
            seen[slots[: self._decoding]] = stops[: self._decoding]
            self._mask = self._hide_from(seen)[:, None, None]
        self._chunks = [
            (slice(end - (stop - start), end), slot, self._hide_from(np.arange(start, stop) + 1))
            for (slot, start, stop), end in zip(chunks[self._decoding :], ends[self._decoding :], strict=True)
        ]

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.cache.keys[0].device)

    def _hide_from(self, lengths: np.ndarray[Any, Any]) -> torch.Tensor:
        """An additive mask [R, longest] from lengths [R]: 0 before a row's length, -inf from there on."""
        hidden = self._tensor(np.arange(lengths.max()) >= lengths[:, None])
        return torch.zeros_like(hidden, dtype=self.cache.keys[0].dtype).masked_fill_(hidden, -torch.inf)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Outputs [N, heads, D] from query [N, heads, D], key and value [N, key-value heads, D]."""
        self.layers_seen.add(layer)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.transpose(1, 2)[self._slots, self.positions[0]] = key
        values.transpose(1, 2)[self._slots, self.positions[0]] = value
        outputs = [
            _attend_chunk(query[tokens], keys[slot], values[slot], mask, scale) for tokens, slot, mask in self._chunks
        ]
        if self._decoding:
            rows = self._slots[: self._decoding]
            spread = query.new_zeros(len(self._mask), *query.shape[1:]).index_copy_(0, rows, query[: self._decoding])
            outputs.insert(0, _attend_rows(spread, keys, values, self._mask, scale)[rows])
        return torch.cat(outputs)


def _attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """The last token of each of R slots: query [R, heads, D], mask [R, 1, 1, L] to outputs [R, heads, D]."""
    rows, length = mask.shape[0], mask.shape[-1]
    # The query heads that share a key-value head stand in for positions, so that keys and values are read only once.
    grouped = query.view(rows, keys.shape[1], -1, query.shape[-1])
    out = scaled_dot_product_attention(
        grouped, keys[:rows, :, :length], values[:rows, :, :length], attn_mask=mask, scale=scale
    )
    return out.reshape(query.shape)


def _attend_chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """C tokens of one slot: query [C, heads, D], keys and values of the slot, mask [C, L] to outputs [C, heads, D]."""
    (count, heads, dim), length = query.shape, mask.shape[-1]
    groups = heads // len(keys)
    out = scaled_dot_product_attention(
        query.transpose(0, 1).reshape(-1, groups, count, dim),
        keys[:, None, :length].expand(-1, groups, -1, -1),
        values[:, None, :length].expand(-1, groups, -1, -1),
        attn_mask=mask,
        scale=scale,
    )
    return out.reshape(heads, count, dim).transpose(0, 1)


def _slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    layout: Layout,
    scaling: float,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What the model calls in place of its own attention; arguments as in transformers' AttentionInterface."""
    refused = [name for name in _UNSUPPORTED if options.get(name) is not None]
    window = options.get("sliding_window")
    if refused or (window is not None and window < layout.cache.length):
        raise ConfigError(f"this model's attention uses {', '.join(refused) or f'a sliding window of {window}'}")
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return layout.attend(module.layer_idx, query, key, value, scaling)[None], None


def use_slot_attention(model: Any, cache: SlotCache) -> None:
    """Make `model` attend as the `layout` says that its forward is given; a trial shows that every layer does.

    Raises ConfigError: it has too few positions, or its layers do more than full attention over their own sequence.
    """
    config = model.config
    if config.max_position_embeddings < cache.length:
        raise ConfigError(
            f"engine.max_length is {cache.length}, the model has {config.max_position_embeddings} positions; lower it"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope in ("dynamic", "longrope"):
        raise ConfigError(f"rope type {rope} makes a sequence depend on others in its batch; use another engine")
    AttentionInterface.register(_NAME, _slot_attention)
    model.set_attn_implementation(_NAME)
    trial = Layout(cache, [Chunk(0, 0, 2)])
    with torch.inference_mode():
        model(torch.zeros_like(trial.positions), position_ids=trial.positions, use_cache=False, layout=trial)
    if len(trial.layers_seen) != config.num_hidden_layers:
        raise ConfigError("this model has layers without cached attention; use another engine")
