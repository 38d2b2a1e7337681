"""Attention over slots against the textbook, at every length: kernels were wrong at some (pytorch issue 191937)."""

from __future__ import annotations

import pytest
import torch

from asyncrl.engine.cache import Layout, SlotCache
from asyncrl.engine.scheduler import SlotChunk
from tests.engine.support import CONFIGS

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def textbook(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One token [heads, D] over what it sees, [key-value heads, L, D]."""
    groups = len(query) // len(keys)
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    weights = (torch.einsum("hd,hld->hl", query, keys) * scale).softmax(-1)
    return torch.einsum("hl,hld->hd", weights, values)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_decoding_slots_and_chunks_see_exactly_their_own_past_at_every_length(device):
    config = CONFIGS["qwen3"]()
    cache = SlotCache(config, slots=5, length=140, dtype=torch.float32, device=torch.device(device))
    torch.manual_seed(0)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    for length in range(3, 140):
        chunks = [
            SlotChunk(3, length - 1, length),
            SlotChunk(0, length // 2, length // 2 + 1),
            SlotChunk(4, length // 3, length),
        ]
        total = sum(chunk.end - chunk.start for chunk in chunks)
        query, (key, value) = torch.randn(total, 4, 16), torch.randn(2, total, 2, 16)
        layout = Layout(cache, chunks)
        out = layout.attend(1, query.to(device), key.to(device), value.to(device), 0.25)
        index = 0
        for slot, start, end in chunks:
            for position in range(start, end):
                assert torch.equal(cache.keys[1][slot, :, position].cpu(), key[index])
                assert layout.positions[0, index] == position
                seen = (tensor[1][slot, :, : position + 1].cpu() for tensor in (cache.keys, cache.values))
                torch.testing.assert_close(out[index].cpu(), textbook(query[index], *seen, 0.25), atol=1e-5, rtol=1e-4)
                index += 1
