"""Agents from outside: coroutine functions that play episodes by the protocols of `server`."""

from __future__ import annotations

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from asyncrl.actor.chat_api.server import Bounds, ChatCounts, EpisodeServer
from asyncrl.actor.contained import contained
from asyncrl.actor.episode import Episode
from asyncrl.config.imports import imported
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.text import reason_of
from asyncrl.types import Task


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What an agent may return: `rewards` of its environment by name, and `metrics`, numbers that are no rewards. An
    episode may have up to MAX_METRICS metrics."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


Agent = Callable[[Task, str, str], Awaitable[AgentResult | Mapping[str, float] | None]]
"""`async def agent(task, base_url, api_key)`: does the task with the chat-completions API at `base_url`, and may return
rewards of its environment by name or an AgentResult. If it raises, the episode fails, and its ticket is tried again."""

MAX_METRICS = 32
METRIC_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class AgentError(AsyncrlError):
    """The agent raised: its episode has no trajectory."""


def load_agent(path: str) -> Agent:
    """The coroutine function at a dotted path. Raises ConfigError."""
    agent: Agent = imported(path, f"actor.agent={path}", "module.coroutine_function")
    try:
        inspect.signature(agent).bind(None, "", "")
    except (TypeError, ValueError):
        fits = False
    else:
        fits = inspect.iscoroutinefunction(agent)
    if not fits:
        raise ConfigError(f"actor.agent={path}: it must be `async def agent(task, base_url, api_key)`")
    return agent


class AgentPlayer:
    """Lets `agent` play episodes, each at an endpoint of its own at `host`; port 0 takes a free one. Endpoints answer
    from `start` to `close`. The timing `agent` leaves out the seconds of `generate`."""

    def __init__(self, agent: Agent, host: str = "127.0.0.1", port: int = 0, bounds: Bounds | None = None) -> None:
        self._agent = agent
        self._server = EpisodeServer(host, port, bounds or Bounds())
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)

    @property
    def counts(self) -> ChatCounts:
        return self._server.counts

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.close()

    async def __call__(self, episode: Episode) -> Mapping[str, float]:
        """Raises AgentError. If the engine failed a request, raises the engine's error, even if the agent hides it."""
        endpoint, url = self._server.open(episode)
        try:
            with episode.timed("agent"):
                result = _checked(await contained(lambda: self._agent(episode.ticket.task, url, endpoint.api_key)))
        except AgentError as error:
            raise endpoint.fault or error from error.__cause__
        except Exception as error:
            raise endpoint.fault or AgentError(f"the agent failed: {reason_of(error)}") from error
        finally:
            self._server.end(episode)
        if endpoint.fault is not None:
            raise endpoint.fault
        episode.seconds["agent"] = max(0.0, episode.seconds["agent"] - episode.seconds["generate"])
        for name, value in result.metrics.items():
            self._metrics[name].append(value)
        return result.rewards

    def counters(self) -> Mapping[str, float]:
        """Counts since the start, and the means of the agent's metrics since the last call."""
        means = {f"agent/{name}": fmean(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        return {**self._server.counters(), **means}


def _checked(returned: object) -> AgentResult:
    """What an agent returned, as numbers. Raises AgentError: it is something else."""
    result = returned if isinstance(returned, AgentResult) else AgentResult(returned or {})  # type: ignore[arg-type]
    try:
        rewards = {name: float(reward) for name, reward in result.rewards.items()}
        metrics = {name: float(value) for name, value in result.metrics.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        wanted = "numbers by name as its rewards, an AgentResult, or nothing"
        raise AgentError(f"the agent returned {returned!r:.200}; it must return {wanted}") from error
    for name, value in metrics.items():
        if not (isinstance(name, str) and METRIC_NAME.fullmatch(name) and math.isfinite(value)):
            raise AgentError(
                f"the agent's metric {name!r:.100} is {value}: use a finite number, and a name of up to 64 letters, "
                "digits, _ . and -"
            )
    if len(metrics) > MAX_METRICS:
        raise AgentError(f"the agent returned {len(metrics)} metrics; at most {MAX_METRICS} are taken")
    return AgentResult(rewards, metrics)
