"""The protocol of a tool: a class with an OpenAI function schema, whose instances hold one episode's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from asyncrl.actor.results import Content


class ToolRefusal(Exception):  # noqa: N818 - a refusal is the policy's mistake, not an error of the system
    """The policy made a call that cannot be answered. The policy reads the text of the exception as the result."""


class Tool(ABC):
    """One tool in one episode. `schema` is the OpenAI function object: name, description, parameters.

    Each episode that offers the tool has its own instance. `execute` may raise ToolRefusal: the policy reads its text
    and goes on. If `execute` raises anything else or takes too long, the tool itself has failed: the call is tried
    again, and then the episode fails, which is never a reward of zero. Several calls of one turn run at the same time.
    All methods run on the event loop: use `asyncio.to_thread` for code that blocks.
    """

    schema: ClassVar[Mapping[str, Any]]

    shared: dict[str, Any]
    """One dictionary of the episode, which all of its tools have; set before `create`."""

    @classmethod
    def prepare(cls) -> None:
        """Called once when an actor starts: warn of what this machine lacks, or raise ConfigError."""

    def __init__(self, episode: str) -> None:
        """`episode` is the episode's unique id, which may name a session elsewhere or seed a generator."""
        self.episode = episode

    async def create(self, **kwargs: Any) -> None:
        """Prepare for an episode with the task's `tools_kwargs[name]`."""

    @abstractmethod
    async def execute(self, arguments: Mapping[str, Any]) -> Content:
        """Answer one call with a text, or with a list of texts and images (`results`). `arguments` have been checked
        against the schema."""

    async def reward(self) -> float:
        """The environment's reward of the finished episode."""
        return 0.0

    async def release(self) -> None:
        """Release the episode's resources; called exactly once, also after a failure."""
