"""The agent that `actor.agent` names."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping

from asyncrl.config.imports import imported
from asyncrl.errors import ConfigError
from asyncrl.types import Task

Agent = Callable[[Task, str, str], Awaitable[Mapping[str, float] | None]]
"""`async def agent(task, base_url, api_key)`: does the task against the chat-completions API at `base_url`, and may
return rewards of its environment by name. What it raises fails the episode, which is then given to another try."""


def load_agent(path: str) -> Agent:
    """The coroutine function at a dotted path. Raises ConfigError."""
    agent: Agent = imported(path, f"actor.agent={path}", "module.coroutine_function")
    if not inspect.iscoroutinefunction(agent):
        raise ConfigError(f"actor.agent={path}: it must be `async def agent(task, base_url, api_key)`")
    return agent
