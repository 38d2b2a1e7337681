"""The base class of tools. A tool is a class with an OpenAI function schema. Each instance holds the state of one
episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from asyncrl.config.schema import ActorConfig
from asyncrl.tools.results import Content


class ToolRefusal(Exception):  # noqa: N818 - a refusal is the policy's mistake, not an error of the system
    """The policy made a call that cannot be answered. The policy reads the text of the exception as the result."""


class StateLostError(Exception):
    """The tool has lost the state of the episode. A retried call would be answered from another state, so the episode
    fails."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The answer to a call, and the `score` of the call. The score of a turn is the sum of the scores of its calls."""

    content: Any
    score: float


class Service(Protocol):
    """A resource that the tools of all episodes share, such as a server. Each episode has one session with the
    service."""

    name: str

    def session(self) -> AbstractAsyncContextManager[Any]:
        """Open the session of one episode. Entering the session may wait until other episodes have left theirs."""
        ...

    async def close(self) -> None:
        """Release the resources that outlive episodes. The service can be used again."""
        ...

    def counters(self) -> Mapping[str, float]:
        """The counts of the service, by the names of metrics."""
        ...


class Tool(ABC):
    """One tool in one episode. `schema` is the OpenAI function object: name, description, parameters.

    Each episode that offers the tool has its own instance. `execute` may raise ToolRefusal: the policy reads the
    exception's text, and the episode continues. If `execute` raises anything else or takes too long, the tool itself
    has failed. Then the call is retried. If it fails too often, the episode fails. A failed episode has no reward, not
    a reward of zero.

    Several calls of one turn run at the same time. All methods run on the event loop: use `asyncio.to_thread` for code
    that blocks.
    """

    schema: ClassVar[Mapping[str, Any]]

    service: ClassVar[Service | None] = None
    session: Any = None
    """The episode's session with `service`; set before `create`, and closed after `release`."""

    limits_itself: ClassVar[bool] = False
    """True if the tool itself limits the time of its calls. `actor.tool_timeout_s` then does not apply."""

    shared: dict[str, Any]
    """A dictionary that all tools of the episode share; set before `create`."""

    takes_call_kwargs: ClassVar[bool] = False
    """True if the tool reads `call_kwargs`. A task with `call_kwargs` for a tool that does not read them is refused."""

    call_kwargs: Mapping[str, Mapping[str, Any]]
    """The fields `execute_kwargs`, `calc_reward_kwargs` and `release_kwargs` of the task's `tools_kwargs[name]`; set
    before `create`."""

    @classmethod
    def configured(cls, actor: ActorConfig) -> type[Tool]:
        """The class for a run: this one, or a subclass with values of the configuration and shared resources.

        Raises ConfigError: the configuration of the tool is invalid.
        """
        return cls

    @classmethod
    def prepare(cls) -> None:
        """Check, once when an actor starts, that this machine can run the tool. Raises ConfigError if it cannot."""

    def __init__(self, episode: str) -> None:
        """`episode` is the episode's unique id. The tool may use it as a seed, or as the name of a session on a
        server."""
        self.episode = episode

    async def create(self, **kwargs: Any) -> None:
        """Prepare for an episode with the task's `tools_kwargs[name]`."""

    @abstractmethod
    async def execute(self, arguments: Mapping[str, Any]) -> Content | Scored:
        """Answer one call with a text, or with a list of texts and images (`results`). `Scored` adds a score.

        `arguments` were checked against the schema.
        """

    async def reward(self) -> float | None:
        """The tool's reward for the finished episode. None: the tool judges nothing."""
        return 0.0

    async def release(self) -> None:
        """Release the episode's resources. Called exactly once, also after a failure."""
