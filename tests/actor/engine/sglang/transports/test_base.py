"""Buckets on their way: one ahead, in order, and the label with the last alone."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest
import torch

from asyncrl.actor.engine.fleet.http import Http, ServerFaultError
from asyncrl.actor.engine.fleet.update import CPU, Update
from asyncrl.actor.engine.sglang.transports.base import ServerEnd, bucketed
from tests.actor.engine.fleet.fakes import FakeSglang, run, serving
from tests.helpers import async_until

TENSORS = {name: torch.zeros(4) for name in "abcde"}


async def test_the_next_bucket_is_made_while_one_is_in_use_and_none_further_ahead():
    made: list[tuple[list[str], str | None]] = []

    def make(bucket: Any, tensors: Any, label: str | None) -> int:
        assert tensors.keys() == TENSORS.keys()
        made.append(([entry.name for entry in bucket.entries], label))
        return len(made)

    taken = 0
    async with aclosing(bucketed(Update(1, "1-me", TENSORS), CPU, 32, make)) as buckets:
        async for number in buckets:
            taken += 1
            assert number == taken
            await async_until(lambda taken=taken: len(made) == min(taken + 1, 3))
    assert made == [(["a", "b"], None), (["c", "d"], None), (["e"], "1-me")]


def test_an_error_of_making_a_bucket_reaches_who_sends_it():
    def make(bucket: Any, tensors: Any, label: str | None) -> int:
        if label:
            raise ValueError("the last one")
        return 0

    async def scenario():
        async with aclosing(bucketed(Update(1, "1-me", TENSORS), CPU, 32, make)) as buckets:
            return [each async for each in buckets]

    with pytest.raises(ValueError, match="the last one"):
        run(scenario)


@pytest.mark.parametrize("spans", [True, False])
async def test_an_update_that_fails_is_ended_on_servers_that_know_begin_and_end(spans):
    server = FakeSglang()

    async def fail(end: ServerEnd) -> None:
        async with end.updating():
            assert server.open is spans
            raise ServerFaultError("in the middle")

    async with serving(server):
        end = ServerEnd(server.url, Http(server.url), 5.0, spans=spans)
        with pytest.raises(ServerFaultError, match="in the middle"):
            await fail(end)
        await end.http.close()
    assert server.calls == (["begin_weight_update", "end_weight_update"] if spans else [])
