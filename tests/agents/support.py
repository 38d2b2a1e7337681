"""Episodes of our own agents against servers in the test's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from aiohttp import web

from asyncrl.agents import Agent
from asyncrl.agents.chat_api.agent import AgentPlayer
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.types import Role, Task, Trajectory
from tests.agents.chat_api.support import CHAT, LIMITS, TOKENIZER
from tests.episode.fakes import END, ScriptedEngine, assert_trains_what_was_sampled, make_ticket

Json = Any


@asynccontextmanager
async def served(routes: Sequence[web.RouteDef], port: int = 0) -> AsyncIterator[str]:
    """The address of a server with these routes."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def task_with(extra_info: Mapping[str, Any], question: str = "Play.") -> Task:
    return Task("t", [{"role": "user", "content": question}], "", "toys", extra_info=extra_info)


async def played(
    agent: Agent,
    task: Task,
    script: Sequence[Any],
    limits: EpisodeLimits = LIMITS,
    begin: Callable[[], None] = lambda: None,
) -> Trajectory:
    """The trajectory of an episode in which the policy says the script."""
    engine = ScriptedEngine(TOKENIZER, script, end=END)
    player = AgentPlayer(agent)
    await player.start()
    try:
        ticket = replace(make_ticket("t/1"), task=task)
        trajectory = await EpisodeRunner(engine, CHAT, player, limits).run(ticket, begin)
    finally:
        await player.close()
    assert_trains_what_was_sampled(trajectory, engine)
    return trajectory


def scores(trajectory: Trajectory) -> list[float | None]:
    """The scores of the policy's turns."""
    return [turn.score for turn in trajectory.turns if turn.role is Role.ASSISTANT]


def shown(trajectory: Trajectory) -> list[str]:
    """The texts of the turns that the policy did not write."""
    return [
        CHAT.text(trajectory.tokens[turn.start : turn.end])
        for turn in trajectory.turns
        if turn.role is not Role.ASSISTANT
    ]


Handler = Callable[[web.Request], Any]
