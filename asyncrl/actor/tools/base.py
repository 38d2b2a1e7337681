"""The protocol of a tool: a class with an OpenAI function schema, whose instances hold one episode's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar


class ToolRefusal(Exception):  # noqa: N818 - a refusal is the policy's mistake, not an error of the system
    """The call cannot be answered because of how the policy made it; its text is what the policy reads."""


class Tool(ABC):
    """One tool in one episode. `schema` is the OpenAI function object: name, description, parameters.

    An instance is made for each episode that offers the tool, with the task's `tools_kwargs` for it. `execute` may
    raise ToolRefusal (the policy reads the text and goes on); any other exception, or taking too long, is the tool's
    own failure: it is retried, and then the episode fails, which is never a reward of zero. Several calls of one turn
    run at the same time, and all methods run on the event loop: what blocks belongs into `asyncio.to_thread`.
    """

    schema: ClassVar[Mapping[str, Any]]

    @classmethod
    def prepare(cls) -> None:
        """Called when a role that uses the tool starts: warn of what this machine lacks, or raise ConfigError."""

    def __init__(self, episode: str) -> None:
        """`episode` is the episode's unique id: a name for a session elsewhere, or a seed."""
        self.episode = episode

    async def create(self, **kwargs: Any) -> None:
        """Prepare for an episode with the task's `tools_kwargs[name]`."""

    @abstractmethod
    async def execute(self, arguments: Mapping[str, Any]) -> str:
        """Answer one call; `arguments` have been checked against the schema."""

    async def reward(self) -> float:
        """The environment's reward of the finished episode."""
        return 0.0

    async def release(self) -> None:
        """Give back whatever the episode holds; called exactly once, also after a failure."""
