"""Runs the Triton kernel in Triton's interpreter, on the CPU, and prints the largest error of each case.

`python -m tests.engine.graphed.attend` needs the environment variable TRITON_INTERPRET=1 from the start, so tests run
it in a process of its own. The interpreter multiplies no matrices of bfloat16.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from asyncrl.engine.graphed import kernel
from asyncrl.engine.graphed.attention import attend_over_slots
from asyncrl.engine.graphed.inputs import PassInputs, PassShape, PassTokens
from asyncrl.engine.scheduler import SlotChunk

CASES = [
    (4, 2, 16, "float32", True),
    (9, 3, 64, "float32", False),
    (9, 3, 64, "float16", True),
    (6, 2, 80, "float16", True),
    (8, 1, 96, "float32", False),
    (2, 2, 256, "float32", False),
]
"""Query heads, key-value heads, width, dtype, and large tiles or small ones."""


def error(heads: int, shared: int, width: int, dtype: str, large: bool) -> float:
    """The largest difference from attention in plain torch. Slots have nan beyond the sequences."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 4, shared, 100, width)
    for each in (keys, values):
        each[3], each[1, :, 80:], each[0, :, 71:], each[2, :, 2:] = torch.nan, torch.nan, torch.nan, torch.nan
    tile = kernel.tile_tokens(heads // shared)[large]
    shape = PassShape(tokens=40, tiles=40, rows=4, tile_tokens=tile)
    buffer = torch.zeros(shape.numbers, dtype=torch.int64)
    tokens = PassTokens(
        np.array([0, 2]), np.array([70, 0]), [SlotChunk(1, 50, 80), SlotChunk(2, 0, 2)], [[0] * 30, [0] * 2]
    )
    tokens.write(PassInputs.of_array(buffer.numpy(), shape), tile, padding=3)
    inputs = PassInputs.of_tensor(buffer, shape)
    query = torch.randn(heads, shape.tokens, width).transpose(0, 1)
    half = [each.to(getattr(torch, dtype)) for each in (query, keys, values)]
    ours = kernel.attend(*half, inputs, width**-0.5).float()
    theirs = attend_over_slots(*(each.float() for each in half), inputs, width**-0.5)
    return float((ours - theirs)[: tokens.count].abs().max())


if __name__ == "__main__":
    sys.stdout.write(json.dumps([[*case, error(*case)] for case in CASES]))
