"""Attention of static passes: in plain torch against the textbook, and the GPU's kernel against plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from asyncrl.engine.cache import SlotCache
from asyncrl.engine.graphed.attention import StaticLayout, attend_over_slots
from asyncrl.engine.graphed.inputs import PassInputs, PassShape, PassTokens
from asyncrl.engine.scheduler import SlotChunk
from tests.engine.support import CONFIGS
from tests.engine.test_cache import textbook
from tests.helpers import GENEROUS_S


def test_every_token_sees_exactly_its_own_past_and_no_nan_beyond_it() -> None:
    cache = SlotCache(CONFIGS["qwen3"](), slots=5, length=60, dtype=torch.float32, device=torch.device("cpu"))
    torch.manual_seed(0)
    tokens = PassTokens(
        np.array([3, 0]), np.array([40, 7]), [SlotChunk(2, 0, 4), SlotChunk(1, 20, 26)], [[0] * 4, [0] * 6]
    )
    for layer in (*cache.keys, *cache.values):
        layer.fill_(torch.nan)
        for slot, start in ((3, 40), (0, 7), (1, 20)):
            layer[slot, :, :start].normal_()
    shape = PassShape(tokens=16, tiles=16, rows=4, tile_tokens=4)
    buffer = torch.zeros(shape.numbers, dtype=torch.int64)
    tokens.write(PassInputs.of_array(buffer.numpy(), shape), shape.tile_tokens, padding=4)
    inputs = PassInputs.of_tensor(buffer, shape)
    query, (key, value) = torch.randn(16, 4, 16), torch.randn(2, 16, 2, 16)
    out = StaticLayout(cache, inputs, attend_over_slots).attend(1, query, key, value, 0.25)
    assert out.isfinite().all()
    for index in range(tokens.count):
        slot, position = inputs.slots[index], inputs.positions[index]
        assert torch.equal(cache.keys[1][slot, :, position], key[index])
        seen = (each[1][slot, :, : position + 1] for each in (cache.keys, cache.values))
        torch.testing.assert_close(out[index], textbook(query[index], *seen, 0.25), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_kernel_computes_the_same_for_every_width_and_number_of_shared_heads() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.graphed.attend"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        timeout=GENEROUS_S,
        check=True,
    )
    found = json.loads(done.stdout)
    assert len(found) == 6
    wrong = [case for case in found if not case[-1] < (2e-3 if "float16" in case else 1e-5)]
    assert wrong == []
