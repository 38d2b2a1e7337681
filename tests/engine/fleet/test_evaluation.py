"""Evaluation on the fleet: a server is leased to it, which keeps its version, and training goes on with the others."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.engine.base import Generation
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.fleet.update import Update
from asyncrl.engine.sglang.server import SglangServer
from asyncrl.types import Sampling
from tests.engine.fleet.fakes import (
    FakeSglang,
    assert_true,
    counter,
    fleet_over,
    fleet_with,
    ids,
    sample,
    serving,
    tensors,
)
from tests.helpers import GENEROUS_S, OWN_RUN, async_until

pytestmark = pytest.mark.slow

ASKED = 2
LONG = 300


async def evaluate(fleet: Fleet, name: str, turns: int = 1) -> Generation:
    """An episode of an evaluation: its last turn."""
    try:
        await fleet.wait_for_version(ASKED, pin=name)
        for turn in range(turns):
            answer = await fleet.generate(ids(), Sampling(0.0, LONG), (), f"{name}/0" if turn else name)
        return answer
    finally:
        fleet.release(name)


@asynccontextmanager
async def training(fleet: Fleet) -> AsyncIterator[dict[str, list[Generation]]]:
    """Sessions of training, one turn after another."""
    trained: dict[str, list[Generation]] = defaultdict(list)

    async def train(name: str) -> None:
        while True:
            trained[name].append(await fleet.generate(ids(), Sampling(1.0, 20), (), name))

    tasks = [asyncio.create_task(train(f"t{i}")) for i in range(4)]
    try:
        await async_until(lambda: len(trained) == len(tasks))
        yield trained
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def versions(generations: list[Generation]) -> set[int]:
    assert_true(*generations)
    return set(np.concatenate([each.versions for each in generations]).tolist())


def in_flight(*servers: FakeSglang) -> int:
    """Requests of evaluations."""
    return sum(request.limit == LONG for server in servers for request in server.running)


async def test_an_evaluation_has_its_version_alone_while_training_goes_on_with_newer_ones() -> None:
    servers = FakeSglang(), FakeSglang(), FakeSglang()
    async with fleet_with(1, *servers) as fleet, training(fleet) as trained:
        evaluating = [asyncio.create_task(evaluate(fleet, f"e{i}", turns=2)) for i in range(4)]
        assert not in_flight(*servers)
        await fleet.update_weights(ASKED, tensors(ASKED))
        await async_until(lambda: in_flight(*servers) == 4)
        for server in servers:
            server.holds = lambda request: request.limit == LONG
        assert counter(fleet, "servers_leased") == 1
        for version in (3, 4):
            await fleet.update_weights(version, tensors(version))
        late = asyncio.create_task(evaluate(fleet, "late"))
        counts = {name: len(turns) for name, turns in trained.items()}
        await async_until(lambda: all(len(turns) > counts[name] + 1 for name, turns in trained.items()))
        assert all(not task.done() for task in evaluating), "the test is to see training meanwhile"
        for server in servers:
            server.holds = lambda _: False
        assert versions(list(await asyncio.gather(*evaluating, late))) == {ASKED}
        assert versions([turn for name, turns in trained.items() for turn in turns[counts[name] + 1 :]]) == {4}


async def test_a_leased_server_that_has_an_older_version_yet_gets_its_own_before_the_first_episode() -> None:
    """Until then it would take requests of training: it makes the update ready while it serves."""
    preparing, go_on = asyncio.Event(), asyncio.Event()

    class Slow(SglangServer):
        async def prepare(self, update: Update) -> None:
            if self.url == slow.url and update.version == ASKED:
                preparing.set()
                await go_on.wait()
            await super().prepare(update)

    quick, slow = FakeSglang(), FakeSglang()
    async with fleet_with(1, quick, slow, kind=Slow) as fleet, training(fleet):
        await fleet.update_weights(ASKED, tensors(ASKED))
        await preparing.wait()
        busy = [asyncio.create_task(sample(fleet, LONG - 1, f"busy{index}")) for index in range(3)]
        await async_until(lambda: len(quick.running) > len(slow.running))
        evaluating = asyncio.create_task(evaluate(fleet, "e"))
        await async_until(lambda: counter(fleet, "servers_leased") == 1)
        leased = fleet._lease.endpoint
        assert leased is not None
        assert leased.server.url == slow.url, "it is the idlest"
        go_on.set()
        assert versions([await evaluating]) == {ASKED}
        assert_true(*await asyncio.gather(*busy))


async def test_a_leased_server_comes_back_to_training_with_the_newest_version() -> None:
    servers, now = (FakeSglang(), FakeSglang()), [0.0]
    async with fleet_with(1, *servers, clock=lambda: now[0]) as fleet:
        evaluating = asyncio.create_task(evaluate(fleet, "e"))
        await fleet.update_weights(ASKED, tensors(ASKED))
        await fleet.update_weights(3, tensors(3))
        assert versions([await evaluating]) == {ASKED}
        assert versions([await evaluate(fleet, "next")]) == {ASKED}, "it stays leased for the next episode"
        now[0] += 10
        await async_until(lambda: all(server.weights == 3 for server in servers))
        assert counter(fleet, "servers_leased") == 0
        assert versions([await evaluate(fleet, "too late")]) == {3}


async def test_one_server_alone_serves_training_and_evaluation() -> None:
    server = FakeSglang()
    async with serving(server), fleet_over(server) as fleet:
        evaluating = asyncio.create_task(evaluate(fleet, "e"))
        await fleet.update_weights(ASKED, tensors(ASKED))
        await async_until(lambda: in_flight(server) == 1)
        server.hold_until(3)
        await fleet.update_weights(3, tensors(3))
        assert versions([await evaluating]) == {ASKED, 3}


@pytest.mark.parametrize("dies", ["the leased one", "the other one"])
async def test_both_go_on_with_the_newest_version_on_the_server_that_is_left(dies: str) -> None:
    servers = FakeSglang(), FakeSglang()
    async with fleet_with(1, *servers) as fleet:
        evaluating = asyncio.create_task(evaluate(fleet, "e", turns=4))
        await fleet.update_weights(ASKED, tensors(ASKED))
        await async_until(lambda: in_flight(*servers) == 1)
        leased, other = servers if in_flight(servers[0]) else servers[::-1]
        leased.hold_until(3)
        await fleet.update_weights(3, tensors(3))
        assert leased.weights == ASKED
        dead, left = (leased, other) if dies == "the leased one" else (other, leased)
        await dead.die()
        await async_until(lambda: left.weights == 3)
        assert_true(await sample(fleet, 20, "t"))
        assert 3 in versions([await evaluating])


async def test_a_server_that_is_leased_while_a_newer_version_is_prepared_for_it_keeps_its_own(tmp_path: Path) -> None:
    first, late = FakeSglang(), FakeSglang()
    preparing, prepared, loading, loaded = threading.Event(), threading.Event(), asyncio.Event(), asyncio.Event()

    def write_config(folder: Path) -> None:
        if "v00000003" in folder.name:
            preparing.set()
            assert prepared.wait(GENEROUS_S)

    async def load(body: Any) -> Any:
        loading.set()
        await loaded.wait()
        return await late._update_weights_from_disk(body)

    async def discover() -> Sequence[str]:
        return urls

    urls: list[str] = []
    late.answers["update_weights_from_disk"] = load
    folders = Folders(tmp_path, write_config, OWN_RUN)
    async with serving(first, late), fleet_over(discover=discover, folders=folders, into_servers="disk") as fleet:
        urls.append(first.url)
        pinned = asyncio.create_task(fleet.wait_for_version(ASKED, pin="e"))
        await fleet.update_weights(ASKED, tensors(ASKED))
        await pinned
        urls.append(late.url)
        await loading.wait()
        newer = asyncio.create_task(fleet.update_weights(3, tensors(3)))
        await async_until(preparing.is_set)
        loaded.set()
        await async_until(lambda: counter(fleet, "servers_leased") == 1)
        prepared.set()
        await newer
        assert (first.weights, late.weights) == (ASKED, 3)
        assert versions([await fleet.generate(ids(), Sampling(0.0, 20), (), "e")]) == {ASKED}
