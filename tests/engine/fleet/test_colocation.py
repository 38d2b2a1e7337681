"""Servers that have their GPUs in turns with the learner: what they hold, and what becomes of their requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.engine.fleet.colocation import GpuSharing
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.machine.gpu_lock import LearnerLock, ServersLock
from tests.engine.fleet.fakes import (
    FakeSglang,
    assert_true,
    counter,
    fleet_over,
    sample,
    servers_ready,
    serving,
    tensors,
)
from tests.helpers import async_until

pytestmark = pytest.mark.slow


@dataclass(eq=False)
class FakeProcess:
    """The process of a fake server; `end` kills it, and `restarts` starts the next one at once."""

    server: FakeSglang
    restarts: bool = True
    starts: int = 1
    answering: bool = True
    freed: bool = False
    running: bool = True
    ended: int = 0

    @property
    def url(self) -> str:
        return self.server.url

    def end(self) -> None:
        self.ended += 1
        for request in list(self.server.running):
            self.server.finish(request, "")
        self.server.hangs.clear()
        self.server.answers.clear()
        self.server.cut()
        self.server.restart()
        self.starts += 1
        self.freed, self.running = False, self.restarts


class Scene:
    """A fleet over servers in turns with a learner."""

    def __init__(self, fleet: Fleet, sharing: GpuSharing, learner: LearnerLock, processes: list[FakeProcess]) -> None:
        self.fleet, self.sharing, self.learner, self.processes = fleet, sharing, learner, processes

    async def learner_begins(self) -> None:
        self.learner.ask()
        await async_until(self.learner.is_ours)

    async def learner_ends(self, version: int) -> None:
        self.learner.give_back(version)
        await self.fleet.update_weights(version, tensors(version))
        await servers_ready(self.fleet, len(self.processes))

    @property
    def crimes(self) -> list[str]:
        return [crime for process in self.processes for crime in process.server.crimes]


@asynccontextmanager
async def scene(
    folder: Path, *servers: FakeSglang, release_s: float = 60.0, version: int = 1, **options: Any
) -> AsyncIterator[Scene]:
    """All servers have `version`, and the GPUs."""
    learner = LearnerLock(folder, 0)
    learner.ask()
    sharing = GpuSharing(ServersLock(folder, 1), release_s)
    async with serving(*servers):
        processes = [FakeProcess(server) for server in servers]
        for process in processes:
            sharing.add(process)
        async with fleet_over(*servers, sharing=sharing, **options) as fleet:
            keeper = asyncio.create_task(sharing.keep())
            try:
                made = Scene(fleet, sharing, learner, processes)
                await made.learner_ends(version)
                yield made
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
                sharing.lock.close()
                learner.close()


@pytest.mark.parametrize("server", ["0.5.23", "0.5.17"])
async def test_servers_have_no_memory_in_the_learners_turn_and_then_serve_its_version(
    tmp_path: Path, server: str
) -> None:
    one, other = FakeSglang(server), FakeSglang(server)
    async with scene(tmp_path, one, other) as made:
        for version in (2, 3):
            await made.learner_begins()
            assert one.freed == other.freed == {"weights", "kv_cache"}
            await made.learner_ends(version)
            assert one.freed == other.freed == set()
            got = await sample(made.fleet)
            assert set(got.versions) == {version}
            assert_true(got)
        assert made.crimes == []
        assert counter(made.fleet, "gpu_periods") == 3
        assert counter(made.fleet, "server_faults") == 0
    order = [call for call in one.calls if "memory" in call or call == "update_weights_from_disk"]
    assert order[-4:] == [
        "release_memory_occupation",
        "resume_memory_occupation",
        "update_weights_from_disk",
        "resume_memory_occupation",
    ]


async def test_a_turn_of_an_episode_is_cut_by_the_learner_and_goes_on_after_it_however_long_it_takes(
    tmp_path: Path,
) -> None:
    server = FakeSglang()
    async with scene(tmp_path, server, settings={"wait_s": 1.0}) as made:
        server.hold_until(2)
        going = asyncio.create_task(sample(made.fleet, 400))
        await async_until(lambda: server.running and len(server.running[0].pairs) > 5)
        await made.learner_begins()
        assert not server.running
        await asyncio.sleep(1.2)  # Longer than a turn waits for a server otherwise.
        await made.learner_ends(2)
        got = await going
        assert len(got.tokens) == 400
        assert set(got.versions) == {1, 2}
        assert_true(got)
        assert made.crimes == []


async def test_servers_rest_until_the_version_that_the_learner_published_has_come(tmp_path: Path) -> None:
    server = FakeSglang()
    async with scene(tmp_path, server) as made:
        await made.learner_begins()
        made.learner.give_back(2)
        await async_until(lambda: made.sharing.ours)
        await asyncio.sleep(0.1)
        assert server.freed == {"weights", "kv_cache"}
        await made.fleet.update_weights(2, tensors(2))
        assert server.calls.count("update_weights_from_disk") == 2, "version 1 is not loaded again"


async def test_a_learner_that_asks_again_before_its_version_was_served_is_served_the_next_one(tmp_path: Path) -> None:
    server = FakeSglang()
    async with scene(tmp_path, server) as made:
        await made.learner_begins()
        late = asyncio.create_task(made.fleet.update_weights(2, tensors(2)))
        await asyncio.sleep(0.05)
        made.learner.give_back(3)
        # The receiver fetches version 3 once 2 is served.
        await late
        await made.fleet.update_weights(3, tensors(3))
        assert set((await sample(made.fleet)).versions) == {3}
        assert made.crimes == []


async def test_a_learner_that_dies_in_its_turn_leaves_the_gpus_to_the_servers_with_the_version_that_they_had(
    tmp_path: Path,
) -> None:
    server = FakeSglang()
    async with scene(tmp_path, server) as made:
        await made.learner_begins()
        made.learner.close()
        await servers_ready(made.fleet, 1)
        got = await sample(made.fleet)
        assert_true(got)
        assert set(got.versions) == {1}
        made.learner = LearnerLock(tmp_path, 0)
        await made.learner_begins()
        assert server.freed == {"weights", "kv_cache"}
        await made.learner_ends(2)
        assert made.crimes == []


@pytest.mark.parametrize("call", ["flush_cache", "release_memory_occupation"])
async def test_a_server_that_hangs_instead_of_freeing_its_memory_is_ended(tmp_path: Path, call: str) -> None:
    server = FakeSglang()
    async with scene(tmp_path, server, release_s=0.3) as made:
        (process,) = made.processes
        process.restarts = False
        server.hangs.add(call)
        await made.learner_begins()
        assert (process.ended, process.running) == (1, False)
        process.running = True
        await made.learner_ends(2)
        assert set((await sample(made.fleet)).versions) == {2}


@pytest.mark.parametrize("call", ["release_memory_occupation", "resume_memory_occupation", "update_weights_from_disk"])
async def test_a_server_that_refuses_a_step_of_a_turn_is_started_again(tmp_path: Path, call: str) -> None:
    server = FakeSglang()
    async with scene(tmp_path, server) as made:
        (process,) = made.processes
        refusing = Refusing()
        if call == "release_memory_occupation":
            server.answers[call] = refusing
            await made.learner_begins()
        else:
            await made.learner_begins()
            server.answers[call] = refusing
        await made.learner_ends(2)
        assert process.ended == 1
        assert refusing.times >= 1
        assert set((await sample(made.fleet)).versions) == {2}
        assert made.crimes == []


class Refusing:
    """Answers 500."""

    def __init__(self) -> None:
        self.times = 0

    async def __call__(self, body: Any) -> Any:
        self.times += 1
        return web.Response(status=500)


async def test_a_server_that_dies_in_the_learners_turn_joins_as_a_new_one(tmp_path: Path) -> None:
    server = FakeSglang()
    async with scene(tmp_path, server) as made:
        await made.learner_begins()
        made.processes[0].end()
        made.processes[0].ended = 0
        await made.learner_ends(2)
        assert made.processes[0].ended == 0, "the new process is left alone"
        assert set((await sample(made.fleet)).versions) == {2}
        assert made.crimes == []


async def test_a_server_that_is_starting_is_waited_for(tmp_path: Path) -> None:
    server = FakeSglang()
    async with scene(tmp_path, server, release_s=0.1) as made:
        (process,) = made.processes
        process.answering, process.restarts = False, False
        server.hangs.add("flush_cache")
        made.learner.ask()
        await asyncio.sleep(0.4)
        assert not made.learner.is_ours()
        assert process.ended == 0, "its start has a limit of its own"
        process.answering = True
        await async_until(made.learner.is_ours)
        assert process.ended == 1


async def test_whoever_waits_for_a_turn_goes_on_within_it(tmp_path: Path) -> None:
    made = LearnerLock(tmp_path, 0)
    made.give_back(0)
    made.ask()
    sharing = GpuSharing(ServersLock(tmp_path, 1))
    keeper = asyncio.create_task(sharing.keep())
    waiting = asyncio.create_task(sharing.begun())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    made.give_back(1)
    await waiting
    assert sharing.ours
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
