"""Agents from outside: coroutine functions that speak the chat-completions API and play episodes with it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass

from asyncrl.actor.chat_api.server import ChatServer
from asyncrl.actor.episode import Episode
from asyncrl.config.imports import imported
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.text import reason_of
from asyncrl.types import Task

Agent = Callable[[Task, str, str], Awaitable[Mapping[str, float] | None]]
"""`async def agent(task, base_url, api_key)`: does the task with the chat-completions API at `base_url`, and may return
rewards of its environment by name. If it raises, the episode fails, and its ticket is tried again."""


class AgentError(AsyncrlError):
    """The agent raised: its episode has no trajectory."""


def load_agent(path: str) -> Agent:
    """The coroutine function at a dotted path. Raises ConfigError."""
    agent: Agent = imported(path, f"actor.agent={path}", "module.coroutine_function")
    if not inspect.iscoroutinefunction(agent):
        raise ConfigError(f"actor.agent={path}: it must be `async def agent(task, base_url, api_key)`")
    return agent


@dataclass(frozen=True)
class AgentPlayer:
    """Lets `agent` play episodes at endpoints of `server`. The timing `agent` leaves out the seconds of `generate`."""

    agent: Agent
    server: ChatServer

    async def __call__(self, episode: Episode) -> Mapping[str, float]:
        """Raises AgentError. If the engine failed a request, raises the engine's error, even if the agent hides it."""
        with episode.timed("agent"), self.server.open(episode) as endpoint:
            try:
                rewards = await self.agent(episode.ticket.task, endpoint.base_url, endpoint.api_key)
            except Exception as error:
                raise endpoint.fault or AgentError(f"the agent failed: {reason_of(error)}") from error
        if endpoint.fault is not None:
            raise endpoint.fault
        episode.seconds["agent"] = max(0.0, episode.seconds["agent"] - episode.seconds["generate"])
        return {name: float(reward) for name, reward in (rewards or {}).items()}

    def counters(self) -> Mapping[str, float]:
        return {f"chat_api_{name}": count for name, count in asdict(self.server.counts).items()}
