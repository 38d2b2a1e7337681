"""The buffer of a static pass: what the host writes is what the device reads, and the rest is padding."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from asyncrl.engine.graphed.inputs import LATEST, PassInputs, PassRows, PassShape, PassTokens, pass_shapes
from asyncrl.engine.scheduler import SlotChunk

PADDING = 9
SHAPE = PassShape(tokens=16, tiles=8, rows=5, tile_tokens=3)


def written(tokens: PassTokens, rows: PassRows) -> PassInputs:
    buffer = torch.full((SHAPE.numbers,), 77)
    parts = PassInputs.of_array(buffer.numpy(), SHAPE)
    tokens.write(parts, SHAPE.tile_tokens, PADDING)
    rows.write(parts, PADDING)
    return PassInputs.of_tensor(buffer, SHAPE)


def test_decoding_sequences_come_first_then_chunks_in_tiles_then_padding() -> None:
    chunks = [SlotChunk(4, 2, 7), SlotChunk(0, 0, 1)]
    tokens = PassTokens(np.array([3, 1]), np.array([8, 5]), chunks, [[10, 11, 12, 13, 14], [20]])
    assert tokens.count == 8
    assert tokens.ends().tolist() == [0, 1, 6, 7]
    rows = PassRows(np.array([0, 1, 7]), np.array([3, 1, 0]), np.array([0.25, 0.5, 0.75]), np.array([1.0, 0.0, 0.7]))
    read = written(tokens, rows)
    assert read.ids.tolist() == [LATEST, LATEST, 10, 11, 12, 13, 14, 20, *[0] * 8]
    assert read.slots.tolist() == [3, 1, 4, 4, 4, 4, 4, 0, *[PADDING] * 8]
    assert read.positions.tolist() == [8, 5, 2, 3, 4, 5, 6, 0, *[0] * 8]
    assert read.firsts.tolist() == [0, 1, 2, 5, 7, 0, 0, 0]
    assert read.counts.tolist() == [1, 1, 3, 2, 1, 0, 0, 0]
    assert read.last.tolist() == [0, 1, 7, 0, 0]
    assert read.targets.tolist() == [3, 1, 0, PADDING, PADDING]
    assert read.noise.tolist() == [0.25, 0.5, 0.75, 0.5, 0.5]
    assert read.temperatures.tolist() == [1.0, 0.0, 0.7, 0.0, 0.0]


def test_a_pass_may_be_empty() -> None:
    none = np.zeros(0, np.int64)
    read = written(PassTokens(none, none, [], []), PassRows(none, none, np.zeros(0), np.zeros(0)))
    assert set(read.slots.tolist()) == {PADDING}
    assert not read.counts.any()


@pytest.mark.parametrize(("largest", "slots"), [(12, 1), (32, 1), (139, 4), (8704, 512), (8448, 256)])
def test_every_number_of_tokens_has_a_shape_with_room_for_its_tiles_and_little_padding(
    largest: int, slots: int
) -> None:
    shapes = pass_shapes(largest, slots, rows=max(slots, 32), tile_tokens=(4, 16))
    sizes = [each.tokens for each in shapes]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    assert all(later <= 2 * size or size < 64 for size, later in pairwise(sizes))
    assert all(later <= 1.5 * size + 1 for size, later in pairwise(sizes) if size >= 64)
    rng = np.random.default_rng(0)
    for shape in shapes:
        # Every slot has one chunk, and the chunks fill the pass.
        chunks = min(slots, shape.tokens)
        cuts = np.sort(rng.choice(np.arange(1, shape.tokens), chunks - 1, replace=False))
        lengths = np.diff([0, *cuts, shape.tokens])
        assert sum(-(-length // shape.tile_tokens) for length in lengths) <= shape.tiles
        assert shape.rows >= chunks
