"""The end of a fleet: it leaves all servers at once, and takes no longer than it may."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.sglang.server import SglangServer
from tests.engine.fleet.fakes import (
    FakeSglang,
    counter,
    fleet_over,
    fleet_with,
    sample,
    servers_ready,
    serving,
    tensors,
)
from tests.helpers import GENEROUS_S, OWN_RUN, async_until

pytestmark = pytest.mark.slow

SOON = {"close_s": 0.3}


async def hang_in_an_update(fleet: Fleet, server: FakeSglang, version: int) -> asyncio.Task[None]:
    server.hangs.add("update_weights_from_disk")
    before = server.calls.count("update_weights_from_disk")
    updating = asyncio.create_task(fleet.update_weights(version, tensors(version)))
    await async_until(lambda: server.calls.count("update_weights_from_disk") > before)
    return updating


def endpoints_at_work() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("endpoint")]


async def test_a_fleet_that_is_closed_in_an_update_ends_though_its_server_refuses_the_end_of_it() -> None:
    server = FakeSglang()
    async with serving(server):
        async with fleet_over(server) as fleet:
            server.refuses.add("end_weight_update")
            updating = await hang_in_an_update(fleet, server, 1)
            assert endpoints_at_work()
        updating.cancel()
        assert not endpoints_at_work()


async def test_a_fleet_leaves_all_its_servers_at_once() -> None:
    leaving, all_leaving = 0, asyncio.Event()
    servers = FakeSglang(), FakeSglang(), FakeSglang()

    class Meeting(SglangServer):
        async def leave(self) -> None:
            nonlocal leaving
            leaving += 1
            if leaving == 2 * len(servers):
                all_leaving.set()
            if leaving > len(servers):
                await all_leaving.wait()
            await super().leave()

    async with fleet_with(1, *servers, kind=Meeting, settings={"close_s": GENEROUS_S}):
        assert leaving == len(servers), "each forgot at its join what it knew of the server"


async def test_a_server_that_does_not_let_go_delays_neither_the_end_nor_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, stuck, closed = FakeSglang(), FakeSglang(), list[str]()
    ending = asyncio.Event()

    class Stuck(SglangServer):
        async def leave(self) -> None:
            if ending.is_set() and self.url == stuck.url:
                await asyncio.Event().wait()

        async def close(self) -> None:
            await super().close()
            closed.append(self.url)

    folders = Folders(tmp_path, lambda folder: None, OWN_RUN)
    async with fleet_with(1, good, stuck, kind=Stuck, folders=folders, settings=SOON):
        ending.set()
    assert closed == [good.url, stuck.url]
    assert "1 servers did not answer in time" in caplog.text
    await async_until(lambda: not folders.directory.exists())


async def test_a_server_that_is_silent_at_the_end_of_an_update_costs_no_more_than_the_limit_and_is_disconnected() -> (
    None
):
    server = FakeSglang()
    async with serving(server):
        async with fleet_over(server, settings=SOON) as fleet:
            await fleet.update_weights(1, tensors(1))
            server.hangs.add("end_weight_update")
            updating = await hang_in_an_update(fleet, server, 2)
        updating.cancel()
        assert not endpoints_at_work()
        await async_until(lambda: not server.connections)


async def test_a_fleet_that_is_closed_while_it_writes_a_version_leaves_nothing(tmp_path: Path) -> None:
    server, begun, go_on = FakeSglang(), threading.Event(), threading.Event()

    def slowly(folder: Path) -> None:
        begun.set()
        go_on.wait(GENEROUS_S)

    folders = Folders(tmp_path, slowly, OWN_RUN)
    async with serving(server):
        async with fleet_over(server, folders=folders, settings=SOON) as fleet:
            updating = asyncio.create_task(fleet.update_weights(1, tensors(1)))
            await async_until(begun.is_set)
        updating.cancel()
        assert folders.directory.exists()
        go_on.set()
        await async_until(lambda: not folders.directory.exists())


async def test_a_fleet_that_is_closed_leaves_a_server_that_still_ends_its_requests_too() -> None:
    stays, leaves, closed = FakeSglang(), FakeSglang(), list[str]()
    servers = [leaves]

    class Noting(SglangServer):
        async def close(self) -> None:
            closed.append(self.url)
            await super().close()

    async def discover() -> Sequence[str]:
        return [server.url for server in servers]

    async with serving(stays, leaves):
        async with fleet_over(discover=discover, kind=Noting) as fleet:
            await fleet.update_weights(1, tensors(1))
            turn = asyncio.create_task(sample(fleet, 10**6))
            await async_until(lambda: leaves.running)
            servers[:] = [stays]
            await async_until(lambda: stays.calls and counter(fleet, "servers") == 1)
            await servers_ready(fleet, 1)
            assert not closed
        turn.cancel()
    assert sorted(closed) == sorted([stays.url, leaves.url])
