"""The port at which an actor answers its agents."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import httpx
import pytest

from asyncrl.agents.chat_api import opening
from asyncrl.agents.chat_api.agent import AgentPlayer
from asyncrl.agents.chat_api.server import Bounds, EpisodeServer
from asyncrl.config.schema import ActorConfig
from asyncrl.errors import ConfigError
from asyncrl.machine import ports
from tests.helpers import async_until


@pytest.mark.slow
def test_an_actor_serves_its_agents_once_their_port_is_free_again(caplog: pytest.LogCaptureFixture) -> None:
    async def started() -> str:
        taken = socket.create_server(("127.0.0.1", 0))
        server = EpisodeServer("127.0.0.1", taken.getsockname()[1], Bounds())
        start = asyncio.create_task(opening._start(cast("AgentPlayer", server), "actor.chat_api_port=1"))
        await async_until(lambda: any("actor.chat_api_port=1" in message for message in caplog.messages))
        taken.close()
        await start
        await server.close()
        return server.url

    assert asyncio.run(started()).startswith("http://127.0.0.1:")


def test_an_actor_whose_port_for_agents_stays_taken_ends_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "TAKEN_S", 0.0)

    async def start() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            server = EpisodeServer("127.0.0.1", taken.getsockname()[1], Bounds())
            try:
                await opening._start(cast("AgentPlayer", server), "actor.chat_api_port=1")
            finally:
                await server.close()

    with pytest.raises(ConfigError, match=r"^actor\.chat_api_port=1: .*in use; free that port or name another one"):
        asyncio.run(start())


async def idle(task: object, base_url: str, api_key: str) -> float:
    """An agent."""
    return 0.0


def test_a_proxy_of_the_environment_does_not_stand_before_the_endpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def status(http_proxy: str) -> int:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "")
        monkeypatch.setenv("HTTP_PROXY", http_proxy)
        async with AsyncExitStack() as stack:
            player = await opening.open_agent(ActorConfig(agent=f"{__name__}.idle"), tmp_path, stack, images=False)
            async with httpx.AsyncClient() as client:
                return (await client.get(f"{player.url}/v1/models")).status_code

    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # It does not listen.
        assert asyncio.run(status(f"http://127.0.0.1:{dead.getsockname()[1]}")) == 404
