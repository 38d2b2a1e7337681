"""Attention over the slots of a cache as one GPU kernel in Triton: see `attend`.

A program computes one tile for one key-value head. It reads the slot's keys and values in blocks, up to the last token
of the tile, and keeps a running softmax. All query heads that share the key-value head are rows of the same matrix, so
keys and values are read once for them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncrl.engine.graphed.inputs import PassInputs

_FEW, _MANY = 16, 64
"""The rows of a tile in passes in which most sequences decode, and in passes in which most tokens belong to prompts.
Fewer than 16 rows save nothing."""
_WIDEST = 256


def tile_tokens(groups: int) -> tuple[int, int]:
    """The numbers of tokens of a tile (see `inputs.pass_shapes`), if `groups` query heads share a key-value head."""
    rows = triton.next_power_of_2(groups)
    return max(1, _FEW // rows), max(1, _MANY // rows)


def supports(width: int) -> bool:
    """True if the kernel computes heads of this width."""
    return width <= _WIDEST


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    output,
    slots,
    positions,
    firsts,
    counts,
    scale,
    query_token,
    query_head,
    output_token,
    slot_stride,
    head_stride,
    groups: tl.constexpr,
    group_rows: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + tile).to(tl.int32)
    if count == 0:
        return
    first = tl.load(firsts + tile)
    begin = tl.load(positions + first).to(tl.int32)
    row, column = tl.arange(0, rows), tl.arange(0, columns)
    token, group = row // group_rows, row % group_rows
    real = ((token < count) & (group < groups))[:, None] & (column < width)[None, :]
    packed, its_head = (first + token)[:, None], (head * groups + group)[:, None]
    queries = tl.load(query + packed * query_token + its_head * query_head + column[None, :], mask=real, other=0.0)
    largest = tl.full([rows], -float("inf"), tl.float32)
    total = tl.full([rows], 0.0, tl.float32)
    sums = tl.full([rows, columns], 0.0, tl.float32)
    # Slots are 64-bit integers, since a cache may have more than 2**31 numbers. The positions within a slot are not.
    start = tl.load(slots + first) * slot_stride + head * head_stride
    keys += start
    values += start
    end = begin + count
    for at in range(0, end, block):
        seen = at + tl.arange(0, block)
        there = (seen < end)[:, None] & (column < width)[None, :]
        where = seen[:, None] * width + column[None, :]
        some_keys = tl.load(keys + where, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(some_keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :] <= (begin + token)[:, None], scores, -float("inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(largest - higher)
        some_values = tl.load(values + where, mask=there, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(some_values.dtype), some_values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        largest = higher
    found = (sums / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + packed * output_token + its_head * width + column[None, :], found, mask=real)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, inputs: PassInputs, scale: float, kernel: Any = _attend
) -> Tensor:
    """Compute attention: see `attention.Attention`. Rows of padding are not written."""
    count, heads, width = query.shape
    query = query if query.stride(2) == 1 else query.contiguous()
    output = torch.empty((count, heads, width), dtype=query.dtype, device=query.device)
    groups = heads // keys.shape[1]
    group_rows = triton.next_power_of_2(groups)
    rows = max(_FEW, inputs.shape.tile_tokens * group_rows)
    kernel[(inputs.shape.tiles, keys.shape[1])](
        query,
        keys,
        values,
        output,
        inputs.slots,
        inputs.positions,
        inputs.firsts,
        inputs.counts,
        scale,
        query.stride(0),
        query.stride(1),
        output.stride(0),
        keys.stride(0),
        keys.stride(1),
        groups=groups,
        group_rows=group_rows,
        width=width,
        columns=max(16, triton.next_power_of_2(width)),
        rows=rows,
        block=32 if width > 128 or query.dtype == torch.float32 else 64,
        num_warps=2 if rows == _FEW else 4,
        num_stages=2,
    )
    return output
