"""Two real servers that come and go under load, by a file and by the real router, and evaluations during training."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncrl.engine.base import Generation
from asyncrl.engine.fleet.discovery import behind_router, in_file
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.fleet.http import Http
from asyncrl.machine.child import kill_group, start_guarded
from asyncrl.machine.ports import free_ports
from asyncrl.types import Sampling
from tests.engine.real import Taken, assert_whole, load, policy, prompts, run, servers_ready, some
from tests.engine.support import assert_exact, parameters
from tests.helpers import async_until
from tests.sglang.support import RealServer, fleet_of

ROUTER = "ASYNCRL_SGLANG_ROUTER_PYTHON"
ASKED = 2
EVALUATED = 100
START_S = 300.0


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    other = RealServer(model, tmp_path_factory.mktemp("other") / "server.log")
    yield other
    other.kill()


async def push(fleet: Fleet, version: int) -> None:
    await fleet.update_weights(version, parameters(policy(version)))


async def under_load(fleet: Fleet, events: Callable[[], Coroutine[Any, Any, None]]) -> list[Taken]:
    """The turns of 8 episodes at once that are begun until `events` have happened."""
    stop = asyncio.Event()

    async def happen() -> None:
        try:
            await events()
        finally:
            stop.set()

    happening = asyncio.create_task(happen())
    taken = await load(fleet, stop, 8)
    await happening
    return taken


def assert_none_lost(taken: list[Taken], versions: int) -> None:
    assert_whole(taken)
    assert {int(version) for _, got, _ in taken for version in got.versions} == set(range(versions))
    models = {version: policy(version) for version in range(versions)}
    for start, got, _ in some(taken):
        assert_exact(models, start, got, 1.0)


def count(fleet: Fleet, name: str) -> float:
    return fleet.stats().counters[name]


def test_an_evaluation_has_its_version_alone_while_training_goes_on_with_newer_ones(
    server: RealServer, other: RealServer
) -> None:
    async def evaluate(fleet: Fleet, index: int, start: Any, pushed: asyncio.Event) -> list[Generation]:
        """Turns that are taken until the pushes have happened, however fast or slow these are."""
        name, turns = f"eval{index}", list[Generation]()
        await fleet.wait_for_version(ASKED, pin=name)
        while not turns or not pushed.is_set():
            turns.append(await fleet.generate(start, Sampling(0.0, EVALUATED), (), name))
        # One that begins after the last push.
        turns.append(await fleet.generate(start, Sampling(0.0, EVALUATED), (), name))
        fleet.release(name)
        return turns

    async def scenario() -> tuple[list[list[Generation]], list[Taken]]:
        await asyncio.gather(server.ready(), other.ready())
        async with fleet_of([server.url, other.url]) as fleet:
            evaluated: list[list[Generation]] = []
            pushed = asyncio.Event()

            async def events() -> None:
                await servers_ready(fleet, 2)
                starts = enumerate(prompts(6, seed=2))
                evaluating = [asyncio.create_task(evaluate(fleet, *each, pushed)) for each in starts]
                await asyncio.sleep(0.5)
                await push(fleet, ASKED)
                await async_until(lambda: count(fleet, "servers_leased") == 1)
                for version in range(ASKED + 1, ASKED + 3):
                    await push(fleet, version)
                pushed.set()
                evaluated.extend(await asyncio.gather(*evaluating))

            await push(fleet, 0)
            await push(fleet, 1)
            return evaluated, await under_load(fleet, events)

    evaluated, trained = run(scenario)
    for start, turns in zip(prompts(6, seed=2), evaluated, strict=True):
        for got in turns:
            assert set(got.versions) == {ASKED}
            assert len(got.tokens) == EVALUATED
        assert_exact({ASKED: policy(ASKED)}, start, turns[-1], 0.0)
    newest = ASKED + 2
    assert any(set(got.versions) == {newest} for _, got, _ in trained), "training goes on with what was pushed"
    assert_whole(trained)
    models = {version: policy(version) for version in range(newest + 1)}
    for start, got, asked_at in some(trained):
        assert min(got.versions) >= asked_at
        assert_exact(models, start, got, 1.0)


class Router:
    """The real one over `urls`; it looks often, so that the test need not wait."""

    def __init__(self, log: Path, *urls: str) -> None:
        self._log = log
        self._port = free_ports(2)
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [os.environ[ROUTER], "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
        self._command += ["--port", str(self._port), "--prometheus-port", str(self._port + 1)]
        self._command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
        self._command += ["--worker-urls", *urls]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = start_guarded(self._command, self._log, {})

    def kill(self) -> None:
        if self._process is not None:
            kill_group(self._process)

    async def add(self, url: str) -> None:
        await self._call("POST", "/workers", json={"url": url})

    async def remove(self, url: str) -> None:
        workers = (await self._call("GET", "/workers"))["workers"]
        (found,) = [each["id"] for each in workers if each["url"] == url]
        await self._call("DELETE", f"/workers/{found}")

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        async with aiohttp.request(method, self.url + path, raise_for_status=True, **options) as response:
            return await response.json()


@pytest.mark.skipif(ROUTER not in os.environ, reason=f"needs a real router: set {ROUTER} to a Python that has it")
def test_the_servers_behind_a_real_router_come_and_go_with_its_own_and_outlive_its_restart(
    server: RealServer, other: RealServer, tmp_path: Path
) -> None:
    router = Router(tmp_path / "router.log", server.url, other.url)

    async def scenario() -> list[Taken]:
        await asyncio.gather(server.ready(), other.ready())
        router.start()
        async with fleet_of(behind_router(router.url)) as fleet:
            await push(fleet, 0)
            await async_until(lambda: count(fleet, "servers_ready") == 2, START_S)

            async def events() -> None:
                await router.remove(other.url)
                await async_until(lambda: count(fleet, "servers") == 1, START_S)
                await push(fleet, 1)
                await router.add(other.url)
                await async_until(lambda: count(fleet, "servers_ready") == 2, START_S)
                router.kill()
                router.start()
                await push(fleet, 2)
                for _ in range(200):
                    await asyncio.sleep(0.1)
                    assert count(fleet, "servers") == 2

            return await under_load(fleet, events)

    try:
        assert_none_lost(run(scenario), versions=3)
    finally:
        router.kill()


def test_servers_added_to_a_file_taken_from_it_and_killed_cost_no_request(
    server: RealServer, other: RealServer, tmp_path: Path
) -> None:
    urls = tmp_path / "urls"

    def write(*servers: RealServer) -> None:
        aside = tmp_path / "urls.new"
        aside.write_text("".join(f"{each.url}\n" for each in servers))
        aside.rename(urls)

    async def weights_of(one: RealServer) -> str:
        http = Http(one.url)
        try:
            return str((await http.get("/model_info", 60))["weight_version"])
        finally:
            await http.close()

    async def scenario() -> tuple[list[Taken], float]:
        await asyncio.gather(server.ready(), other.ready())
        write(server)
        async with fleet_of(in_file(urls)) as fleet:

            async def events() -> None:
                await asyncio.sleep(1)
                write(server, other)
                await servers_ready(fleet, 2)
                await push(fleet, 1)
                await servers_ready(fleet, 2)
                write(other)
                await async_until(lambda: count(fleet, "servers") == 1)
                await push(fleet, 2)
                assert (await weights_of(server)).startswith("1-"), "it has left"
                write(other, server)
                await servers_ready(fleet, 2)
                await asyncio.sleep(1)
                other.kill()
                await servers_ready(fleet, 1)
                write(server)
                await async_until(lambda: count(fleet, "servers") == 1)
                await push(fleet, 3)
                await asyncio.sleep(1)

            await push(fleet, 0)
            return await under_load(fleet, events), count(fleet, "lost_segments")

    taken, lost = run(scenario)
    assert lost > 0, "the one that was killed had requests, which went elsewhere"
    assert_none_lost(taken, versions=4)
