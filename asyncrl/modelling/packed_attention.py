"""Causal attention over packed sequences, registered with transformers under `PACKED`.

A mask over N packed tokens costs O(N^2). Here each sequence attends to itself only: with a variable-length flash kernel
where there is one (CUDA, half precision), else sequence by sequence. Measured on one CPU thread with a 1.7M-parameter
model and sequences of 60 to 240 tokens, forward and backward: 5.4k tokens/s, against 4.8k with padded attention, 3.7k
with everything padded, and 3.1k and 2.0k with masks over 1024 and 2048 packed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED = "asyncrl_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lengths: list[int],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention [1, N, heads, D] of query [1, heads, N, D] over key and value [1, kv heads, N, D].

    `lengths` are the tokens of each packed sequence. It is for models whose attention does no more than that
    (`asyncrl.modelling.attention_kinds`).
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, lengths, scaling, sliding_window), None
    pieces = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    outputs = [_one(q, k, v, scaling, sliding_window) for q, k, v in pieces]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


def _one(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    length = query.shape[2]
    gqa = query.shape[1] != key.shape[1]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
    distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    mask = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=gqa)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *lengths], device=query.device).cumsum(0, dtype=torch.int32)
    # Not every torch that has the kernel lets heads share keys and values in it.
    shared = query.shape[1] // key.shape[1]
    output = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).repeat_interleave(shared, 1),
        value[0].transpose(0, 1).repeat_interleave(shared, 1),
        ends,
        ends,
        max(lengths),
        max(lengths),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
    )
    assert isinstance(output, Tensor)
    return output[None]


AttentionInterface.register(PACKED, packed_attention)
