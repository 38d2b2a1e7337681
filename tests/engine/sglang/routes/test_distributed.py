"""A group with one server: what is refused, what is silent, and what dies costs a bounded time and no other group.

The other side is a fake that joins with the store's prefixes spelt out as SGLang and torch have them; tests/sglang has
the real one.
"""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aiohttp import web

from asyncrl.engine.fleet.http import Http, ServerRefusedError
from asyncrl.engine.fleet.server import ServerFaultError
from asyncrl.engine.fleet.update import CPU, Update
from asyncrl.engine.sglang.routes.base import ServerEnd
from asyncrl.engine.sglang.routes.distributed import DistributedServerRoute
from asyncrl.types import Sampling
from asyncrl.weights.group import WeightGroup
from asyncrl.weights.threads import ROUTE_THREAD
from tests.engine.fleet.fakes import FakeSglang, assert_true, fleet_over, ids, run, serving, tensors
from tests.helpers import async_until
from tests.weights.fakes import same_bits, some_tensors

pytestmark = pytest.mark.slow

RANKS = 2
SHORT = Sampling(1.0, 5)
WAIT = timedelta(seconds=20)


class Ranks(FakeSglang):
    """A server of two ranks that takes broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, list[Any]] = {}
        self.names: list[str] = []
        self.received: list[dict[str, torch.Tensor]] = [{}, {}]
        self.broadcasts = 0
        self.dies_in_broadcast: int | None = None

    async def _init_weights_update_group(self, body: Any) -> Any:
        assert (body["rank_offset"], body["world_size"], body["backend"]) == (1, 1 + RANKS, "gloo")
        self.names.append(body["group_name"])
        joins = (asyncio.to_thread(_join, body, rank) for rank in range(1, 1 + RANKS))
        try:
            self.groups[body["group_name"]] = await asyncio.gather(*joins)
        except RuntimeError as error:
            return web.json_response({"message": str(error)}, status=400)
        return {}

    async def _destroy_weights_update_group(self, body: Any) -> Any:
        if self.groups.pop(body["group_name"], None) is None:
            return web.json_response({"message": "does not exist"}, status=400)
        return {}

    async def _update_weights_from_distributed(self, body: Any) -> Any:
        if not self.open:
            return web.json_response({"message": "needs begin_weight_update"}, status=400)
        assert (body["load_format"], body["flush_cache"]) == ("flattened_bucket", False)
        self.broadcasts += 1
        if self.broadcasts == self.dies_in_broadcast:
            self.end = asyncio.create_task(self.die())
            await self._dying.wait()
        group = self.groups[body["group_name"]]
        try:
            await asyncio.gather(*(asyncio.to_thread(self._receive, group, i, body) for i in range(RANKS)))
        except RuntimeError as error:
            return web.json_response({"message": f"Failed to receive weights: {error}"}, status=400)
        self.weights = int(self.received[0].get("w", torch.tensor(self.weights)))
        self.label = body.get("weight_version") or self.label
        return {}

    def _receive(self, group: list[Any], index: int, body: Any) -> None:
        """The bytes lie without gaps, each tensor where its dtype may begin, or a server refuses them."""
        parts = list(zip(body["names"], [getattr(torch, each) for each in body["dtypes"]], body["shapes"], strict=True))
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in parts]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        group[index].broadcast([flat], options).wait(WAIT)
        start = 0
        for (name, dtype, shape), size in zip(parts, sizes, strict=True):
            assert start % dtype.itemsize == 0
            part = flat[start : start + size]
            self.received[index][name] = part.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
            start += size


def _join(body: Any, rank: int) -> Any:
    place = body["master_address"], body["master_port"]
    store = dist.TCPStore(*place, body["world_size"], False, WAIT)
    name = body["group_name"]
    prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    return dist.ProcessGroupGloo(prefixed, rank, body["world_size"], WAIT)


def calls_into_torch() -> bool:
    return ROUTE_THREAD in {thread.name for thread in threading.enumerate()}


def route_to(
    server: FakeSglang,
    timeout_s: float = 20.0,
    bucket_bytes: int = 1 << 20,
    **options: Any,
) -> DistributedServerRoute:
    end = ServerEnd(server.url, Http(server.url), 20.0, spans=True, ranks=RANKS)
    return DistributedServerRoute(end, CPU, bucket_bytes, timeout_s, False, **options)


@pytest.mark.parametrize("bucket_bytes", [1, 600, 1 << 20])
async def test_every_rank_gets_the_same_bits_of_every_dtype_and_one_group_lasts_for_all_updates(bucket_bytes):
    server = Ranks()

    async with serving(server):
        route = route_to(server, bucket_bytes=bucket_bytes)
        for version in range(3):
            await route.send(Update(version, f"{version}-me", some_tensors(version)))
            assert server.label == f"{version}-me"
            assert not server.open
            assert all(same_bits(each, some_tensors(version)) for each in server.received)
        await route.reset()
        await route.end.http.close()
    assert len(server.names) == 1
    assert not server.groups, "the server was told to forget the group"


async def test_an_update_after_a_server_joined_anew_has_a_group_of_another_name():
    server = Ranks()

    async with serving(server):
        route = route_to(server)
        for version in range(2):
            await route.send(Update(version, f"{version}-me", tensors(version)))
            await route.reset()
        await route.end.http.close()
    assert len(set(server.names)) == 2
    assert server.weights == 1


def test_a_server_that_refuses_a_way_gets_the_weights_by_the_next_one():
    server = Ranks()
    server.refuses.add("update_weights_from_disk")

    async def scenario():
        async with serving(server), fleet_over(server, here=True) as fleet:
            for version in (3, 4):
                await fleet.update_weights(version, tensors(version))
            return await fleet.generate(ids(), SHORT, (), "s")

    assert_true(run(scenario))
    assert server.calls.count("update_weights_from_disk") == 1


def test_a_server_that_will_not_join_refuses_at_once_and_is_fenced(caplog):
    server = FakeSglang()
    server.refuses.add("init_weights_update_group")

    async def scenario():
        async with serving(server), fleet_over(server, into_servers="gloo") as fleet:
            updating = asyncio.create_task(fleet.update_weights(3, tensors(3)))
            await async_until(lambda: fleet.stats().counters["server_faults"] == 1 and not calls_into_torch())
            updating.cancel()

    # Less than the 30 s for which a side that comes later would be waited for.
    run(scenario)
    assert "takes no weights, not by gloo" in caplog.text
    assert not server.open


@pytest.mark.parametrize("hangs", ["init_weights_update_group", "update_weights_from_distributed"])
async def test_an_update_that_is_cut_off_leaves_no_call_into_torch_behind_which_would_abort_the_exit(hangs):
    server = Ranks()
    server.hangs.add(hangs)

    async with serving(server):
        route = route_to(server)
        sending = asyncio.create_task(route.send(Update(1, "1-me", {"w": torch.zeros(8 << 20)})))
        await async_until(lambda: hangs in server.calls and calls_into_torch())
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await route.reset()
        # A thread ends a moment after its call.
        await async_until(lambda: not calls_into_torch())
        await route.end.http.close()


async def test_a_reset_waits_for_a_call_that_is_still_within_torch():
    server, returns = Ranks(), threading.Event()

    class Slow(WeightGroup):
        def begin(self, tensor):
            returns.wait()
            return super().begin(tensor)

    async with serving(server):
        route = route_to(server, make_group=Slow)
        sending = asyncio.create_task(route.send(Update(1, "1-me", tensors(1))))
        await async_until(lambda: "update_weights_from_distributed" in server.calls)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        resetting = asyncio.create_task(route.reset())
        await async_until(lambda: "destroy_weights_update_group" in server.calls)
        done, _ = await asyncio.wait((resetting,), timeout=0.2)
        assert not done
        returns.set()
        await resetting
        await route.end.http.close()


async def test_nobody_waits_for_a_side_that_never_comes():
    server = FakeSglang()
    server.hangs.add("init_weights_update_group")

    async with serving(server):
        route = route_to(server, timeout_s=0.5)
        with pytest.raises(ServerFaultError):
            await route.send(Update(1, "1-me", tensors(1)))
        await route.end.http.close()


async def test_a_refused_broadcast_ends_for_both_sides_and_the_next_update_forms_a_new_group():
    server = Ranks()

    async with serving(server):
        route = route_to(server)
        await route.send(Update(0, "0-me", tensors(0)))
        server.refuses.add("update_weights_from_distributed")
        with pytest.raises(ServerRefusedError):
            await route.send(Update(1, "1-me", tensors(1)))
        assert not server.open
        server.refuses.clear()
        await route.send(Update(2, "2-me", tensors(2)))
        await route.end.http.close()
    assert server.weights == 2
    assert len(set(server.names)) == 2
    assert list(server.groups) == server.names[1:]


@pytest.mark.heavy
async def test_a_server_that_is_silent_in_a_broadcast_is_a_fault_within_the_limit():
    server = Ranks()

    async with serving(server):
        route = route_to(server, timeout_s=5.0)
        await route.send(Update(0, "0-me", tensors(0)))
        server.hangs.add("update_weights_from_distributed")
        with pytest.raises(ServerFaultError):
            await route.send(Update(1, "1-me", {"w": torch.zeros(8 << 20)}))
        await route.end.http.close()


def test_the_group_of_another_server_goes_on_where_one_dies_in_a_broadcast():
    good, bad = Ranks(), Ranks()
    bad.dies_in_broadcast = 2

    async def scenario():
        async with serving(good, bad), fleet_over(good, bad, into_servers="gloo") as fleet:
            for version in range(4):
                await fleet.update_weights(version, tensors(version))
            await async_until(lambda: fleet.stats().counters["server_faults"] >= 1)
            return await fleet.generate(ids(), SHORT, (), "s")

    assert_true(run(scenario))
    assert len(good.names) == 1


async def test_the_store_listens_where_strangers_are_only_where_that_is_allowed():
    server = FakeSglang()

    async with serving(server):
        route = route_to(server, own_address=lambda host, port: "192.0.2.1")
        with pytest.raises(ServerRefusedError, match=r"192\.0\.2\.1.*network\.insecure=true"):
            await route.send(Update(1, "1-me", tensors(1)))
        await route.end.http.close()
    assert "init_weights_update_group" not in server.calls
