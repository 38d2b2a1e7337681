"""The embedded engine takes no more of a GPU's memory than it uses. These tests need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.engine.graphed import passes
from asyncrl.engine.graphed.capture import capture
from asyncrl.engine.own_weights import OwnWeights
from tests.engine.support import tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_updates_of_the_weights_use_the_same_memory_again() -> None:
    model = tiny_model().cuda()
    weights = OwnWeights(model, in_place=True)
    update = {name: each.detach().cpu() for name, each in model.named_parameters()}
    taken = []
    for _ in range(10):
        weights.load(weights.stage(update))
        taken.append(torch.cuda.memory_reserved())
    assert taken[2:] == taken[2:3] * 8


def test_graphs_of_one_pool_and_stream_share_the_memory_of_intermediate_results() -> None:
    numbers = torch.ones(1 << 24, device="cuda")

    def compute() -> None:
        numbers.copy_((numbers + 1) - 1)

    compute()
    torch.cuda.empty_cache()
    pool, stream, taken = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), [torch.cuda.memory_reserved()]
    graphs = []
    for _ in range(3):
        graphs.append(capture(compute, pool, stream))
        taken.append(torch.cuda.memory_reserved())
    assert taken[0] < taken[1] == taken[2] == taken[3]


def test_an_engine_records_all_its_graphs_in_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[torch.cuda.Stream] = []

    def remembered(function: Callable[[], None], pool: Any, stream: torch.cuda.Stream) -> Callable[[], None]:
        streams.append(stream)
        return capture(function, pool, stream)

    monkeypatch.setattr(passes, "capture", remembered)
    passes.GraphedPasses(tiny_model().cuda(), 4, 64, 32)
    assert len(streams) > 1
    assert all(each is streams[0] for each in streams)
