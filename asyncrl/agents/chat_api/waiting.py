"""Agents that may let an episode wait: for a free program or session, or for an agent that connects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from asyncrl.agents.chat_api.result import AgentResult
from asyncrl.types import Task


class WaitingAgent(ABC):
    """An agent that says when it begins to play an episode, so that no limit counts the time before."""

    @abstractmethod
    async def wait_and_play(self, task: Task, base_url: str, api_key: str, begin: Callable[[], None]) -> AgentResult:
        """Wait until the episode can be played, call `begin`, and play it."""

    async def __call__(self, task: Task, base_url: str, api_key: str) -> AgentResult:
        return await self.wait_and_play(task, base_url, api_key, lambda: None)
