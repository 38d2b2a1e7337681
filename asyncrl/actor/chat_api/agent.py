"""Agents from outside: coroutine functions that play episodes with the chat-completions API.

Each episode has an OpenAI-compatible endpoint, over any engine. Its address contains its ticket's id, and it takes its
own key only. A completion is recorded in the episode before it is sent. If the client closes its connection before
that, as clients do after a timeout, the request is cancelled and nothing of it is recorded.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from urllib.parse import quote

from aiohttp import web

from asyncrl.actor.chat import NO_FORMAT
from asyncrl.actor.chat_api.messages import as_events, completion_body, read_request
from asyncrl.actor.contained import contained
from asyncrl.actor.episode import Episode
from asyncrl.actor.parsing import ParsedTurn
from asyncrl.actor.recorder import LimitError
from asyncrl.config.imports import imported
from asyncrl.errors import AsyncrlError, ConfigError, RefusedError
from asyncrl.network.throttle import ErrorLogger
from asyncrl.text import encodable, reason_of
from asyncrl.types import Task

log = logging.getLogger(__name__)


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

MAX_REQUEST_BYTES = 64 << 20


@dataclass(slots=True)
class ChatCounts:
    """Since the start: requests answered, refused, and abandoned (the client closed its connection before the answer
    was ready, or the episode ended), and branches with a completion."""

    answered: int = 0
    refused: int = 0
    abandoned: int = 0
    branches: int = 0


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


@dataclass(eq=False)
class EpisodeEndpoint:
    """An episode that takes requests with its key. `fault` is an error of the engine, or of our own code, that failed a
    request; whatever the agent does then is not its fault."""

    episode: Episode
    api_key: str
    fault: Exception | None = None


class AgentPlayer:
    """Lets `agent` play episodes, each at an endpoint of its own at `host`; port 0 takes a free one. Endpoints answer
    from `start` to `close`. The timing `agent` leaves out the seconds of `generate`."""

    def __init__(self, agent: Agent, host: str = "127.0.0.1", port: int = 0) -> None:
        self.counts = ChatCounts()
        self._agent = agent
        self._host = host
        self._port = port
        self._endpoints: dict[str, EpisodeEndpoint] = {}
        self._error_logger = ErrorLogger(log)
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/{ticket}/v1/chat/completions", self._chat_completions)
        app.router.add_get("/{ticket}/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self._port = self._runner.addresses[0][1]
        log.info("agents are served at %s:%d", self._host, self._port)

    async def close(self) -> None:
        await self._runner.cleanup()

    async def __call__(self, episode: Episode) -> Mapping[str, float]:
        """Raises AgentError. If the engine failed a request, raises the engine's error, even if the agent hides it."""
        name = episode.ticket.id
        endpoint = self._endpoints[name] = EpisodeEndpoint(episode, secrets.token_urlsafe(16))
        url = f"http://{self._host}:{self._port}/{quote(name, safe='')}/v1"
        try:
            with episode.timed("agent"):
                result = _checked(await contained(lambda: self._agent(episode.ticket.task, url, endpoint.api_key)))
        except AgentError as error:
            raise endpoint.fault or error from error.__cause__
        except Exception as error:
            raise endpoint.fault or AgentError(f"the agent failed: {reason_of(error)}") from error
        finally:
            del self._endpoints[name]
            episode.end()
            self.counts.branches += len(episode.recorder.last_completions())
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
        return {f"chat_api_{name}": count for name, count in asdict(self.counts).items()} | means

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "asyncrl"}]}
        )

    async def _chat_completions(self, http: web.Request) -> web.Response:
        endpoint = self._endpoints.get(http.match_info["ticket"])
        key = http.headers.get("Authorization", "").removeprefix("Bearer ")
        if endpoint is None or not secrets.compare_digest(
            key.encode(errors="surrogateescape"), endpoint.api_key.encode()
        ):
            return _error(401, "there is no such episode, or this is not its key", "invalid_api_key")
        try:
            return await self._answer(endpoint.episode, await _json(http))
        except RefusedError as error:
            self.counts.refused += 1
            return _error(400, str(error), error.code if isinstance(error, LimitError) else "invalid_request_error")
        except asyncio.CancelledError:
            self.counts.abandoned += 1
            raise
        except Exception as error:
            if endpoint.episode.is_over:
                self.counts.abandoned += 1
            else:
                endpoint.fault = error
                self._error_logger.exception(f"episode {endpoint.episode.ticket.id} fails: {reason_of(error)}", error)
            return _error(503, str(error), "engine_error")

    async def _answer(self, episode: Episode, body: object) -> web.Response:
        request, stream = read_request(body)
        if request.tools and episode.chat.format is None:
            raise RefusedError(NO_FORMAT)
        functions = {tool["function"]["name"]: tool["function"] for tool in request.tools}

        def read_turn(text: str, ended: bool) -> ParsedTurn:
            """All calls or none: a turn with a malformed call is text to the agent."""
            turn = episode.chat.parse(text, functions)
            return turn if turn.made else turn._replace(calls=(), ids=())

        completion = await episode.complete(request, read_turn)
        self.counts.answered += 1
        answer = completion_body(completion, created=int(time.time()))
        if stream:
            return web.Response(body=as_events(answer), content_type="text/event-stream")
        return web.json_response(answer)


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


async def _json(http: web.Request) -> object:
    try:
        return encodable(await http.json())
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedError(f"the body has more than {MAX_REQUEST_BYTES} bytes") from error
    except (ValueError, LookupError, RecursionError, web.RequestPayloadError) as error:
        raise RefusedError("the body is not JSON") from error


def _error(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": code, "code": code}}, status=status)
