"""The protocol of a tool: a class with an OpenAI function schema, whose instances hold one episode's state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Protocol

from asyncrl.config.schema import ActorConfig
from asyncrl.tools.results import Content


class ToolRefusal(Exception):  # noqa: N818 - a refusal is the policy's mistake, not an error of the system
    """The policy made a call that cannot be answered. The policy reads the text of the exception as the result."""


class StateLostError(Exception):
    """The tool has lost what it knew of the episode, so that another try would answer from another state: the episode
    fails at once."""


class Service(Protocol):
    """What tools of all episodes share, such as a server. The tools of one episode have one session with it."""

    name: str

    def session(self) -> AbstractAsyncContextManager[Any]:
        """The session of one episode. Entering it may wait until another episode has left its own."""
        ...

    async def close(self) -> None:
        """Release what is held beyond episodes. It can be used again."""
        ...

    def counters(self) -> Mapping[str, float]:
        """What it counts, by the names of metrics."""
        ...


class Tool(ABC):
    """One tool in one episode. `schema` is the OpenAI function object: name, description, parameters.

    Each episode that offers the tool has its own instance. `execute` may raise ToolRefusal: the policy reads its text
    and goes on. If `execute` raises anything else or takes too long, the tool itself has failed: the call is tried
    again, and then the episode fails, which is never a reward of zero. Several calls of one turn run at the same time.
    All methods run on the event loop: use `asyncio.to_thread` for code that blocks.
    """

    schema: ClassVar[Mapping[str, Any]]

    service: ClassVar[Service | None] = None
    session: Any = None
    """The episode's session with `service`; set before `create`, and left after `release`."""

    limits_itself: ClassVar[bool] = False
    """Whether its calls have limits of time of their own, so that `actor.tool_timeout_s` does not hold."""

    shared: dict[str, Any]
    """One dictionary of the episode, which all of its tools have; set before `create`."""

    @classmethod
    def configured(cls, actor: ActorConfig) -> type[Tool]:
        """The class for a run: this one, or one derived from it that has what the configuration says, and what the
        episodes of an actor share. Raises ConfigError."""
        return cls

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
