"""A real server keeps a buffer of weights open, and loads later versions by the copies of its first load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.engine.sglang.routes.opening import ServerRouteSettings
from asyncrl.engine.sglang.server import SglangServer
from tests.engine.real import (
    assert_nothing_lost,
    assert_sampled_from,
    fleet_over,
    policy,
    push_under_load,
    sample_at_temperatures,
)
from tests.engine.support import canary_check, parameters
from tests.sglang.shared_memory import ARGUMENTS, ENVIRONMENT, keep_on_cpu, shares_memory
from tests.sglang.support import RealServer


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "server.log"


@pytest.fixture(scope="module")
def keeping(model: Path, log: Path) -> Iterator[RealServer]:
    server = RealServer(model, log, *ARGUMENTS, environment=ENVIRONMENT)
    yield server
    server.kill()


def open_server(url: str) -> SglangServer:
    return SglangServer(url, context=512, settings=ServerRouteSettings("ipc"), silence_s=30, look=shares_memory)


async def test_a_real_server_serves_each_version_that_it_copied_from_the_buffer_that_it_keeps(
    keeping: RealServer, log: Path, monkeypatch: pytest.MonkeyPatch
):
    keep_on_cpu(monkeypatch)
    models = {version: policy(version) for version in range(4)}
    await keeping.ready()
    async with fleet_over([keeping.url], open_server, models[0]) as fleet:
        for version, model in models.items():
            await fleet.update_weights(version, parameters(model), canary_check(model, version))
            assert_sampled_from(model, version, await sample_at_temperatures(fleet))
    assert "asyncrl loads the weights of Qwen3ForCausalLM by copies at once" in log.read_text()


async def test_turns_go_on_through_pushes_from_a_kept_buffer(keeping: RealServer, monkeypatch: pytest.MonkeyPatch):
    keep_on_cpu(monkeypatch)
    models = {version: policy(version) for version in range(4)}
    await keeping.ready()
    async with fleet_over([keeping.url], open_server, models[0]) as fleet:
        taken, counters = await push_under_load(fleet, models, episodes=4)
    assert_nothing_lost(taken, counters, models, "retract")


async def test_a_restarted_server_gets_a_new_buffer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keep_on_cpu(monkeypatch)
    server = RealServer(model, tmp_path / "server.log", *ARGUMENTS, environment=ENVIRONMENT)
    try:
        await server.ready()
        async with fleet_over([server.url], open_server, policy(0)) as fleet:
            for version in (0, 1):
                await fleet.update_weights(version, parameters(policy(version)))
            server.kill()
            server.restart()
            await server.ready()
            await asyncio.wait_for(fleet.update_weights(2, parameters(policy(2))), 300)
            assert_sampled_from(policy(2), 2, await sample_at_temperatures(fleet))
    finally:
        server.kill()
