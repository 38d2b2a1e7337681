"""Buckets on their way: one ahead, in order, and the label with the last alone."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest
import torch

from asyncrl.engine.fleet.http import Http, ServerFaultError
from asyncrl.engine.fleet.update import CPU, Update
from asyncrl.engine.sglang.routes.base import BucketServerRoute, ServerEnd, bucketed
from asyncrl.weights.buckets import Bucket, tight_buckets
from asyncrl.weights.manifest import specs_of
from tests.engine.fleet.fakes import FakeSglang, serving
from tests.helpers import async_until


class Noting(dict[str, torch.Tensor]):
    """Notes which tensors were read; the last one cannot be read where it is `broken`."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__({name: torch.full((4,), float(index)) for index, name in enumerate("abcde")})
        self.read: set[str] = set()
        self._broken = broken

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._broken and name == "e":
            raise ValueError("the last one")
        self.read.add(name)
        return super().__getitem__(name)


class Given(Update):
    """An update whose tensors are not copied."""

    def __init__(self, tensors: Noting) -> None:
        super().__init__(1, "1-me", tensors)
        self._given = tensors

    async def tensors(self, device: torch.device = CPU) -> Noting:
        return self._given


def pairs(tensors: Noting) -> list[Bucket]:
    """Buckets of two tensors each."""
    return tight_buckets(specs_of(tensors), 32)


async def test_the_next_bucket_is_filled_while_one_is_in_use_and_none_further_ahead_and_the_last_names_the_weights():
    tensors = Noting()
    taken: list[tuple[list[str], list[float], Any]] = []
    async with aclosing(bucketed(Given(tensors), pairs(tensors), CPU, CPU)) as buckets:
        async for bucket, flat, body in buckets:
            values = flat.view(torch.float32)[::4].tolist()
            taken.append(([entry.name for entry in bucket.entries], values, body.get("weight_version")))
            assert (body["load_format"], body["flush_cache"]) == ("flattened_bucket", False)
            ahead = set("abcde"[: 2 * len(taken) + 2])
            await async_until(lambda ahead=ahead: tensors.read == ahead)
    assert taken == [(["a", "b"], [0, 1], None), (["c", "d"], [2, 3], None), (["e"], [4], "1-me")]


async def test_an_error_of_filling_a_bucket_reaches_who_sends_it():
    tensors = Noting(broken=True)
    with pytest.raises(ValueError, match="the last one"):
        async with aclosing(bucketed(Given(tensors), pairs(tensors), CPU, CPU)) as buckets:
            assert [each async for each in buckets]


class Buckets(BucketServerRoute):
    """Gives what it sends, and fills buckets from the memory of the host as for a GPU if it `copies`."""

    def __init__(self, copies: bool) -> None:
        super().__init__(ServerEnd("", Http(""), 1.0), CPU, 32)
        self._copies = copies

    async def source(self, update: Update) -> torch.device:
        # Another device in name, with the same memory.
        return torch.device("cpu", 0) if self._copies else CPU

    async def sent(self, update: Update) -> list[float]:
        async with aclosing(self.buckets(update)) as made:
            return [value async for _, flat, _ in made for value in flat.view(torch.float32)[::4].tolist()]

    async def send(self, update: Update) -> None:
        await self.sent(update)


@pytest.mark.parametrize("copies", [False, True])
async def test_two_buckets_are_there_before_a_server_stops_and_of_the_update_that_is_sent(copies: bool):
    route, tensors = Buckets(copies), Noting()
    await route.prepare(Given(Noting()))
    newer = Given(tensors)
    await route.prepare(newer)
    await async_until(lambda: tensors.read == set("abcd"))
    assert await route.sent(newer) == [0, 1, 2, 3, 4]
    assert await route.sent(newer) == [0, 1, 2, 3, 4]
    await route.prepare(newer)
    await route.reset()


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
