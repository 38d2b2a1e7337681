"""An agent's side of an episode over the real endpoint, which has a scripted engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from asyncrl.agents import AgentResult
from asyncrl.agents.chat_api.agent import AgentPlayer
from asyncrl.agents.chat_api.server import Bounds
from asyncrl.chat.chat import Chat
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.images import ImageDesk
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.types import Task, Trajectory
from tests.episode.fakes import (
    CHATML,
    END,
    Script,
    ScriptedEngine,
    assert_trains_what_was_sampled,
    make_ticket,
    make_tokenizer,
)

TOKENIZER = make_tokenizer(CHATML)
CHAT = Chat(TOKENIZER)
LIMITS = EpisodeLimits(max_turns=8, max_turn_tokens=400, max_tokens=4000, max_total_tokens=40_000)
TOOL = {
    "type": "function",
    "function": {"name": "echo", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}


class Agent:
    """An agent's side of an episode: what it knows, sends and, at its end, returns or raises. `pending` are requests
    that it does not wait for; they end before the episode's `trajectory` is there."""

    def __init__(self, engine: ScriptedEngine, bounds: Bounds | None = None) -> None:
        self.engine = engine
        self.player = AgentPlayer(self, bounds=bounds)
        self.counts = self.player.counts
        self.outcome: AgentResult | dict[str, float] | Exception | None = None
        self.pending: list[asyncio.Task[Any]] = []
        self.address: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        self.done = asyncio.Event()
        self.trajectory: Trajectory

    async def __call__(self, task: Task, base_url: str, api_key: str) -> AgentResult | dict[str, float] | None:
        self.address.set_result((base_url, api_key))
        await self.done.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def send(
        self, url: str = "", key: str = "", headers: Any = None, path: str = "chat/completions", **body: Any
    ) -> tuple[int, Any]:
        """The status and the body of the answer. `url` and `key` are the episode's, unless others are given."""
        own_url, own_key = await self.address
        headers = {"Authorization": f"Bearer {key or own_key}", **(headers or {})}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{url or own_url}/{path}", **body) as answer,
        ):
            return answer.status, await (answer.json() if answer.content_type == "application/json" else answer.text())

    async def post(self, *messages: dict[str, Any], **body: Any) -> tuple[int, Any]:
        return await self.send(json={"messages": messages, **body})

    async def ask(self, *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
        """The message of the answer."""
        status, answer = await self.post(*messages, **body)
        assert status == 200, answer
        return dict(answer["choices"][0]["message"])

    async def refusal(self, *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
        status, answer = await self.post(*messages, **body)
        assert status == 400, answer
        return dict(answer["error"])


@asynccontextmanager
async def episode(
    script: Script,
    limits: EpisodeLimits = LIMITS,
    tokenizer: Any = TOKENIZER,
    end: str = END,
    fails: tuple[type[Exception], str] | None = None,
    bounds: Bounds | None = None,
    images: ImageDesk | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Agent]:
    """An episode whose agent does what the body does. Then it has a trajectory, or `fails` so."""
    agent = Agent(ScriptedEngine(tokenizer, script, end=end), bounds)
    await agent.player.start()
    runner = EpisodeRunner(agent.engine, Chat(tokenizer), agent.player, limits, images=images, clock=clock)
    running = asyncio.create_task(runner.run(make_ticket("t/1"), lambda: None))
    try:
        yield agent
        agent.done.set()
        if fails:
            with pytest.raises(fails[0], match=fails[1]):
                await running
            return
        agent.trajectory = await running
        await asyncio.gather(*agent.pending)
        assert_trains_what_was_sampled(agent.trajectory, agent.engine)
    finally:
        running.cancel()
        await agent.player.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}
