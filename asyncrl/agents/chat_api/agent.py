"""Plays episodes with agents: each episode has an endpoint, from which its agent requests completions."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, cast

from asyncrl.agents.chat_api.result import Agent, AgentError, MetricMeans, checked
from asyncrl.agents.chat_api.server import Bounds, ChatCounts, EpisodeServer
from asyncrl.agents.chat_api.sessions import Sessions
from asyncrl.agents.chat_api.waiting import WaitingAgent
from asyncrl.config.imports import imported
from asyncrl.episode.episode import Episode
from asyncrl.errors import ConfigError
from asyncrl.machine.process import is_ctrl_c
from asyncrl.plain import copied
from asyncrl.text import reason_of
from asyncrl.tools.contained import contained
from asyncrl.tools.environments.thread import EpisodeThread
from asyncrl.types import Task

Counters = Callable[[], Mapping[str, float]]

BUILT_IN: Mapping[str, str] = {
    "openenv": "asyncrl.agents.openenv.OpenEnvAgent",
    "nemo_gym": "asyncrl.agents.nemo_gym.NemoGymAgent",
}
"""The built-in agents by their names in `actor.agent`."""


def load_agent(path: str, options: Mapping[str, Any]) -> Agent:
    """Load a built-in agent by its name, or a function or a class by its dotted path.

    A function gets the `options` at each call. A class gets them once, when its object is made. A synchronous agent
    runs in a thread. Raises ConfigError: the agent cannot be loaded, made or called.
    """
    setting = f"actor.agent={path}"
    agent: Any = imported(BUILT_IN.get(path, path), setting, f"module.function, or one of {', '.join(BUILT_IN)}, verl")
    given = {str(name): value for name, value in options.items()}
    if isinstance(agent, type):
        agent = _made(agent, setting, given)
        given = {}
    try:
        inspect.signature(agent).bind(None, "", "", **given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{setting} cannot be called: {error}; it must be `async def agent(task, base_url, api_key)` or the same "
            "without async, with a parameter for each of actor.agent_options; or a class that takes these options and "
            "whose objects are called with (task, base_url, api_key)"
        ) from error
    is_async = inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(agent.__call__)
    called = (lambda *arguments: agent(*arguments, **copied(given))) if given else agent
    return cast("Agent", called if is_async else partial(_in_thread, called))


def _made(cls: type, setting: str, options: Mapping[str, Any]) -> Any:
    """Make an agent of a class. Raises ConfigError: the class does not take the options, or raises an exception."""
    try:
        inspect.signature(cls).bind(**options)
        return cls(**copied(dict(options)))
    except ConfigError:
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(f"{setting} cannot be made with actor.agent_options: {reason_of(error)}") from error


async def _in_thread(function: Callable[[Task, str, str], Any], task: Task, base_url: str, api_key: str) -> Any:
    """Run a synchronous agent in a separate thread."""
    # A thread cannot be stopped. If the episode ends before its agent, the agent continues without an endpoint.
    thread = EpisodeThread("agent")
    try:
        returned = await thread.call(partial(function, task, base_url, api_key))
        return await returned if inspect.isawaitable(returned) else returned
    finally:
        thread.close()


class AgentPlayer:
    """Lets `agent` play episodes, each with its own endpoint at `host`. Port 0: any free port.

    Endpoints answer from `start` to `close`. An episode's timing `agent` does not include the seconds in its timing
    `generate`. `counters` reads the agent's counters.
    """

    def __init__(
        self,
        agent: Agent,
        host: str = "127.0.0.1",
        port: int = 0,
        bounds: Bounds | None = None,
        counters: Counters = dict,
        sessions: Sessions | None = None,
    ) -> None:
        self._agent = agent
        self._of_agent = counters
        self._server = EpisodeServer(host, port, bounds or Bounds(), sessions)
        self._metrics = MetricMeans()

    @property
    def counts(self) -> ChatCounts:
        return self._server.counts

    @property
    def url(self) -> str:
        """The address of the endpoints; it is known only after `start`."""
        return self._server.url

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.close()

    async def __call__(self, episode: Episode) -> Mapping[str, float]:
        """Let the agent play one episode. Returns the episode's rewards.

        Raises AgentError: the agent failed. If the engine failed on a request, raises the engine's error, even if the
        agent ignored the failure.
        """
        endpoint, url = self._server.open(episode)
        play = partial(self._play, episode, url, endpoint.api_key)
        try:
            with episode.timed("agent"):
                result = checked(await contained(play))
            if result.turns:
                episode.recorder.score_all(result.turns)
        except AgentError as error:
            raise endpoint.fault or error from error.__cause__
        except Exception as error:
            raise endpoint.fault or AgentError(f"the agent failed: {reason_of(error)}") from error
        finally:
            self._server.end(episode)
        if endpoint.fault is not None:
            raise endpoint.fault
        episode.seconds["agent"] = max(0.0, episode.seconds["agent"] - episode.seconds["generate"])
        self._metrics.add(result.metrics)
        return result.rewards

    def _play(self, episode: Episode, url: str, api_key: str) -> Awaitable[Any]:
        task = episode.ticket.task.copy()
        # A user's subclass of a built-in agent may have a `__call__` of its own.
        if isinstance(self._agent, WaitingAgent) and type(self._agent).__call__ is WaitingAgent.__call__:
            return self._agent.wait_and_play(task, url, api_key, episode.begin)
        episode.begin()
        return self._agent(task, url, api_key)

    def counters(self) -> Mapping[str, float]:
        """Counts since the actor started, and the means of the agent's metrics since this method was last called."""
        means = {f"agent/{name}": value for name, value in self._metrics.take().items()}
        return {**self._server.counters(), **self._of_agent(), **means}
