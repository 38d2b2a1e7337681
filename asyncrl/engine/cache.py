"""Keeps keys and values in a fixed number of slots, and computes a Hugging Face decoder's attention over them.

A forward pass takes N packed tokens [1, N]: first one token of each decoding slot (a slot that samples its next token),
then chunks of prompts. The model's own modules compute everything except attention. For attention, transformers'
attention interface calls this file with the `Layout` of the forward pass.

The layout writes the new keys and values into their slots. Then the decoding slots attend, and after them the chunks,
one by one. No prompt is padded.

On a GPU, all decoding slots attend together, over a view of the cache that is as long as the longest of their
sequences. On a CPU, groups of a few decoding slots of similar lengths attend together, over copies of their keys and
values. The copies take less time than one long view, in which the short sequences would read keys that they do not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.engine.scheduler import SlotChunk
from asyncrl.errors import ConfigError
from asyncrl.modelling.attention import check_positions, check_same_logits, inspect_attention

_NAME = "asyncrl_slots"
_TRIAL = 8
_CPU_ROWS = 14
"""The maximum number of decoding slots that attend together on a CPU."""


class SlotCache:
    """The keys and values of each layer: tensors [slots, key-value heads, length, D].

    All keys and values start as zeros: masked positions still enter a product, with weight 0, so even they must be
    finite.

    Raises ConfigError: the model's configuration names no attention heads, for example because the model is recurrent.
    """

    def __init__(self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        if not getattr(config, "num_attention_heads", None):
            raise ConfigError(
                f"the embedded engine cannot serve this model: its configuration ({config.model_type}) names no "
                "attention heads, but the engine keeps the keys and values of heads; use another engine"
            )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # The attribute is missing in families whose heads share no keys and values.
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = (2, config.num_hidden_layers, slots, heads, length, head_dim)
        self.length = length
        self.groups = config.num_attention_heads // heads
        self._stored = torch.zeros(shape, dtype=dtype, device=device)
        self.keys, self.values = (each.unbind() for each in self._stored)

    def wipe(self, slot: int) -> None:
        """Set one slot to zero; needed only if it may contain nan or infinity."""
        self._stored[:, :, slot].zero_()

    def copy(self, source: int, slot: int, count: int) -> None:
        """Copy the keys and values of the first `count` tokens from slot `source` into `slot`."""
        self._stored[:, :, slot, :, :count] = self._stored[:, :, source, :, :count]


class Layout:
    """The cache positions of the N packed tokens of one pass, and the positions that each token sees.

    - `chunks` must begin with all chunks that have only one token.
    - `positions` int64[1, N], on the device: the position of each token in its slot
    - `last`, an int64 array of numpy: the index of each chunk's last token among the N tokens
    """

    def __init__(self, cache: SlotCache, chunks: Sequence[SlotChunk]) -> None:
        slots, starts, stops = np.array(chunks, np.int64).T
        counts = stops - starts
        ends = counts.cumsum()
        self.cache = cache
        self.last = ends - 1
        self._slots = self._tensor(slots.repeat(counts))
        self.positions = self._tensor(np.arange(ends[-1]) - (ends - stops).repeat(counts))[None]
        self._decoding = int((counts == 1).sum())
        self._groups = self._group(slots[: self._decoding], stops[: self._decoding])
        self._chunks = [
            (slice(end - count, end), slot, self._hide_from(np.arange(stop - count, stop) + 1).repeat(cache.groups, 1))
            for slot, stop, count, end in zip(slots, stops, counts, ends, strict=True)
            if count > 1
        ]

    def _group(
        self, slots: np.ndarray[Any, Any], stops: np.ndarray[Any, Any]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Group the decoding slots that attend together. Returns for each group the indices of its packed tokens, its
        slots (None: attend without copies) and its mask. Without copies, the mask has a row for every slot up to the
        highest one that decodes.
        """
        if not len(slots):
            return []
        if self.cache.keys[0].device.type != "cpu":
            # The mask has a row for each slot up to the highest. A slot that does not decode in this pass sees no
            # position, and its output is not used.
            seen = np.zeros(slots.max() + 1, np.int64)
            seen[slots] = stops
            return [(self._tensor(np.arange(len(slots))), None, self._hide_from(seen)[:, None, None])]
        parts = np.array_split(stops.argsort(kind="stable"), -(-len(stops) // _CPU_ROWS))
        return [
            (self._tensor(part), self._tensor(slots[part]), self._hide_from(stops[part])[:, None, None])
            for part in parts
        ]

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.cache.keys[0].device)

    def _hide_from(self, lengths: np.ndarray[Any, Any]) -> torch.Tensor:
        """An additive mask [R, longest] for lengths [R]: 0 at positions below a row's length, -inf at all others."""
        hidden = self._tensor(np.arange(lengths.max()) >= lengths[:, None])
        return torch.zeros_like(hidden, dtype=self.cache.keys[0].dtype).masked_fill_(hidden, -torch.inf)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Compute outputs [N, heads, D] from query [N, heads, D], key and value [N, key-value heads, D]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.transpose(1, 2)[self._slots, self.positions[0]] = key
        values.transpose(1, 2)[self._slots, self.positions[0]] = value
        output = torch.empty_like(query)
        for rows, slots, mask in self._groups:
            if slots is None:
                slots = self._slots[: self._decoding]
                spread = query.new_zeros(len(mask), *query.shape[1:]).index_copy_(0, slots, query[rows])
                every = slice(len(mask))
                attended = _attend(spread[:, None], keys[every], values[every], mask, scale)[slots]
            else:
                seen_keys, seen_values = (
                    each[:, :, : mask.shape[-1]].index_select(0, slots) for each in (keys, values)
                )
                attended = _attend(query[rows, None], seen_keys, seen_values, mask, scale)
            output[rows] = attended[:, 0]
        for tokens, slot, mask in self._chunks:
            one = slice(slot, slot + 1)
            output[tokens] = _attend(query[None, tokens], keys[one], values[one], mask[None, None], scale)[0]
        return output


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend with C tokens of each of R slots; returns outputs [R, C, heads, D].

    Shapes: query [R, C, heads, D], keys and values [R, key-value heads, length, D]. The mask [R, 1, rows, L] is for the
    first L positions of a slot; it has heads / key-value heads * C rows, or 1 row for all.
    """
    rows, count, heads, dim = query.shape
    # The query heads that share a key-value head are folded into the positions. So keys and values are read only once
    # and never broadcast: a CUDA kernel is silently wrong for broadcasts of some lengths (pytorch issue 191937).
    folded = query.transpose(1, 2).reshape(rows, keys.shape[1], -1, dim)
    length = mask.shape[-1]
    out = scaled_dot_product_attention(folded, keys[:, :, :length], values[:, :, :length], attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, count, dim).transpose(1, 2)


def _slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    layout: Layout,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention in place of the model's own. transformers' AttentionInterface passes these arguments."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return layout.attend(module.layer_idx, query, key, value, scaling)[None], None


@torch.inference_mode()
def use_slot_attention(model: Any, cache: SlotCache) -> None:
    """Make `model` attend by the `layout` that is given to its method `forward`. The function checks in trial passes
    that the log-probs stay the same.

    Raises ConfigError: the model has too few positions, or its layers do more than full attention over their sequence.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or cache.length
    if positions < cache.length:
        raise ConfigError(
            f"engine.max_length is {cache.length}, the model has {positions} positions; lower actor.max_tokens, and "
            "engine.max_length if it is set"
        )
    plain = config._attn_implementation
    try:
        _check_kind(model, cache)
        model.set_attn_implementation(plain)
        ids = torch.arange(min(_TRIAL, cache.length), device=model.device) * 7 % config.vocab_size
        alone = model(ids[None], use_cache=False).logits[0]
        model.set_attn_implementation(_NAME)
        _check_slots(model, cache, ids, alone)
    except ConfigError as error:
        raise ConfigError(f"the embedded engine cannot serve this model: {error}; use another engine") from error


def _check_kind(model: Any, cache: SlotCache) -> None:
    check_positions(model.config, cache.length)
    found = inspect_attention(model, cache.length)
    heads, width = cache.keys[0].shape[1], cache.keys[0].shape[3]
    for each in found:
        if each.window is not None:
            raise ConfigError(
                f"layer {each.layer} has a sliding window of {each.window} tokens, less than engine.max_length="
                f"{cache.length}"
            )
        if each.keys != (heads, width) or each.values != (heads, width):
            raise ConfigError(
                f"layer {each.layer} has keys of {each.keys} and values of {each.values} (heads, width), where the "
                f"cache has {(heads, width)}"
            )
    if sorted(each.layer for each in found) != list(range(len(cache.keys))):
        raise ConfigError("some layers attend more than once")


def _check_slots(model: Any, cache: SlotCache, ids: torch.Tensor, alone: torch.Tensor) -> None:
    """Check that the logits of `ids` equal `alone`, the logits of a plain pass. Slot 0 computes them by a chunk and
    then token by token, slot 1 by one chunk. Raises ConfigError: they differ."""
    half, count = max(1, len(ids) // 2), len(ids)
    passes = [[SlotChunk(0, 0, half)], *([SlotChunk(0, index, index + 1)] for index in range(half, count))]
    if len(cache.keys[0]) > 1:
        passes[-1].append(SlotChunk(1, 0, count))
    for chunks in passes:
        layout = Layout(cache, chunks)
        where = torch.cat([torch.arange(chunk.start, chunk.end, device=ids.device) for chunk in chunks])
        ours = model(ids[where][None], position_ids=layout.positions, use_cache=False, layout=layout).logits[0]
        reason = "its log-probs change with cached keys and values"
        check_same_logits(alone[where], ours, model.dtype, reason)


AttentionInterface.register(_NAME, _slot_attention)
