"""The HTTP server by which agents reach the policy. Each episode has its own address and key.

A client that sends too much, sends too slowly or sends nonsense is refused or disconnected. It disturbs no other
client. The size of bodies, the number of connections and of simultaneous requests, and the time to send or read are
limited. A body is read only if the request has a valid key.

A completion is recorded in the episode before it is sent. If the client closes its connection before that, for example
after a timeout, the request is cancelled and not recorded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from urllib.parse import quote

from aiohttp import web

from asyncrl.agents.chat_api.anthropic_messages import AnthropicMessages
from asyncrl.agents.chat_api.api import Api, Conversations, PolicyRequest
from asyncrl.agents.chat_api.chat_completions import ChatCompletions
from asyncrl.agents.chat_api.responses import Responses
from asyncrl.agents.chat_api.session_routes import MAX_BODY_BYTES, SessionRoutes, key_of
from asyncrl.agents.chat_api.sessions import Sessions
from asyncrl.chat.chat import NO_FORMAT
from asyncrl.chat.messages import MAX_LEVELS
from asyncrl.chat.parsing import ParsedTurn
from asyncrl.episode.episode import Episode
from asyncrl.episode.images import TooManyImagesError
from asyncrl.episode.limits import LimitError
from asyncrl.episode.recorder import CompletionRequest
from asyncrl.errors import RefusedError
from asyncrl.masking import masked_text
from asyncrl.network.http_server import ConnectionBounds, HttpServer, shows_key
from asyncrl.network.throttle import ErrorLogger
from asyncrl.text import count_characters, encodable, nested_within, reason_of

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 << 20
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}

APIS: tuple[Api, ...] = (ChatCompletions(), Responses(), AnthropicMessages())


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on clients.

    - `connections`: the limits that hold for all connections
    - `at_once`: the maximum number of requests of one episode that may be unanswered at once
    - `body_s`, `body_bytes`: how many seconds a client with a key may take to send a body, and how many bytes the body
      may have
    - `reading_s`: how many seconds a client may take to read a completion
    """

    connections: ConnectionBounds = field(default_factory=ConnectionBounds)
    at_once: int = 256
    body_s: float = 60.0
    body_bytes: int = MAX_REQUEST_BYTES
    reading_s: float = 60.0


WITH_IMAGES = Bounds(at_once=64, body_bytes=64 << 20)
"""The limits for a policy that reads images. Bodies may be larger, since a request repeats all images of its
conversation.

To limit the total bytes, fewer requests are allowed at once.
"""


@dataclass(slots=True)
class ChatCounts:
    """Counts since the actor started.

    - `answered`: requests that got a completion. `refused`: refused requests.
    - `abandoned`: requests whose client closed its connection before the answer was ready, or whose episode ended.
    - `branches`: branches with a completion. A branch is a token sequence that grows turn by turn. An episode has
      several, for example, if its agent rewrote the conversation.
    - `overridden`: answered requests with settings that had no effect.
    - `wanted_calls`: completions for which the agent wanted a tool call. `unmet_calls`: how many of these completions
      have no call.
    """

    answered: int = 0
    refused: int = 0
    abandoned: int = 0
    branches: int = 0
    overridden: int = 0
    wanted_calls: int = 0
    unmet_calls: int = 0


@dataclass(eq=False)
class EpisodeEndpoint:
    """An episode that accepts requests with its key.

    `fault` is the last error of the engine, or of asyncrl itself, that made a request fail; None if there was none. The
    episode then fails with `fault`, even if its agent returns a result or raises another error.
    """

    episode: Episode
    api_key: str
    fault: Exception | None = None
    conversations: Conversations = field(default_factory=dict)
    at_once: int = 0


class EpisodeServer:
    """Answers requests at `host` from `start` to `close`. Port 0: any free port."""

    def __init__(self, host: str, port: int, bounds: Bounds, sessions: Sessions | None = None) -> None:
        self.counts = ChatCounts()
        self._sessions = sessions
        self._bounds = bounds
        self._host = host
        self._port = port
        self._endpoints: dict[str, EpisodeEndpoint] = {}
        self._error_logger = ErrorLogger(log)
        app = web.Application(client_max_size=bounds.body_bytes)
        for api in APIS:
            app.router.add_post(f"/{{ticket}}/v1/{api.path}", partial(self._post, api))
        app.router.add_get("/{ticket}/v1/models", self._models)
        if sessions is not None:
            small = replace(bounds, body_bytes=min(bounds.body_bytes, MAX_BODY_BYTES))
            SessionRoutes(sessions, partial(_json, bounds=small)).add_to(app.router)
        self._http = HttpServer(app, bounds.connections, log, "the endpoint of agents got data that is not a request")

    async def start(self) -> None:
        """Listen. Raises OSError: the address cannot be used; `start` may be called again."""
        self._port = await self._http.start(host=self._host, port=self._port)
        log.info("agents are served at %s", self.url)

    @property
    def url(self) -> str:
        """The address of the server; it is known only after `start`."""
        return f"http://{self._host}:{self._port}"

    async def close(self) -> None:
        await self._http.close()

    def open(self, episode: Episode) -> tuple[EpisodeEndpoint, str]:
        """Open an endpoint for the episode. It answers until `end`. Returns the endpoint and its address."""
        name = episode.ticket.id
        endpoint = self._endpoints[name] = EpisodeEndpoint(episode, secrets.token_urlsafe(16))
        return endpoint, f"{self.url}/{quote(name, safe='')}/v1"

    def end(self, episode: Episode) -> None:
        """Close the endpoint of an episode, and end the episode."""
        del self._endpoints[episode.ticket.id]
        episode.end()
        self.counts.branches += len(episode.recorder.last_completions())

    def counters(self) -> Mapping[str, float]:
        """Counts since the actor started."""
        return {f"chat_api_{name}": count for name, count in asdict(self.counts).items()}

    async def _models(self, http: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "asyncrl"}
        if endpoint := self._permitted(http):
            model["max_model_len"] = endpoint.episode.limits.max_tokens
        return web.json_response({"object": "list", "data": [model]})

    def _permitted(self, http: web.Request) -> EpisodeEndpoint | None:
        """The endpoint of the request's episode. None if the request does not have the episode's key."""
        endpoint = self._endpoints.get(http.match_info["ticket"])
        key = key_of(http)
        if endpoint is None or not secrets.compare_digest(
            key.encode(errors="surrogateescape"), endpoint.api_key.encode()
        ):
            return None
        shows_key(http)
        return endpoint

    async def _post(self, api: Api, http: web.Request) -> web.StreamResponse:
        endpoint = self._permitted(http)
        if endpoint is None:
            return _error(api, 401, "there is no such episode, or this is not its key", "invalid_api_key")
        if endpoint.at_once >= self._bounds.at_once:
            self.counts.refused += 1
            return _error(
                api, 429, f"{endpoint.at_once} requests of this episode are not answered yet", "too_many_requests"
            )
        endpoint.at_once += 1
        try:
            with nullcontext() if self._sessions is None else self._sessions.at_work(endpoint.episode.ticket.id):
                return await self._handled(api, endpoint, http)
        finally:
            endpoint.at_once -= 1

    async def _handled(self, api: Api, endpoint: EpisodeEndpoint, http: web.Request) -> web.StreamResponse:
        try:
            request, answer = await self._answer(api, endpoint, await _json(http, self._bounds))
        except (LimitError, TooManyImagesError) as error:
            self.counts.refused += 1
            endpoint.episode.recorder.truncated = True
            return _error(api, 400, str(error), error.code)
        except RefusedError as error:
            self.counts.refused += 1
            return _error(api, 400, str(error), "invalid_request_error")
        except asyncio.CancelledError:
            self.counts.abandoned += 1
            raise
        except Exception as error:
            if endpoint.episode.is_over:
                self.counts.abandoned += 1
            else:
                endpoint.fault = error
                self._error_logger.exception(f"episode {endpoint.episode.ticket.id} fails: {reason_of(error)}", error)
            return _error(api, 503, masked_text(str(error)), "engine_error")
        if request.stream:
            return await _sent(http, _STREAM, api.events(request, answer), self._bounds.reading_s)
        body = json.dumps(answer).encode()
        headers = {"Content-Type": "application/json; charset=utf-8", "Content-Length": str(len(body))}
        return await _sent(http, headers, [body], self._bounds.reading_s)

    async def _answer(
        self, api: Api, endpoint: EpisodeEndpoint, body: object
    ) -> tuple[PolicyRequest, Mapping[str, object]]:
        if not isinstance(body, dict):
            raise RefusedError("a request must be an object")
        episode, chat = endpoint.episode, endpoint.episode.chat
        request = api.read(body, endpoint.conversations)
        shown = await episode.images.show(request.completion.messages)
        wanted = request.completion._replace(messages=chat.with_thoughts(shown))
        if wanted.tools and chat.format is None:
            raise RefusedError(NO_FORMAT)
        _check_length(episode, wanted)
        functions = {tool["function"]["name"]: tool["function"] for tool in wanted.tools}

        def read_turn(text: str, ended: bool) -> ParsedTurn:
            # If one call is malformed, the agent gets the whole turn as text, without calls.
            turn = chat.parse_apart(text, functions)
            return turn if turn.made else turn._replace(calls=(), ids=())

        completions = await episode.complete_all(wanted, read_turn, request.count)
        self.counts.answered += 1
        self.counts.overridden += bool(request.overridden)
        if request.wants_call:
            self.counts.wanted_calls += len(completions)
            self.counts.unmet_calls += sum(not each.turn.made for each in completions)
        return request, api.answer(request, completions, chat, int(time.time()), endpoint.conversations)


def _check_length(episode: Episode, request: CompletionRequest) -> None:
    """Raises LimitError: the conversation has too many characters for `max_tokens` tokens, even if each token is as
    long as the longest one."""
    # The check comes before rendering and encoding: with such a long text, these would block all episodes.
    limits, characters = episode.limits, count_characters([request.messages, request.tools])
    if characters > limits.max_tokens * episode.chat.longest_piece and limits.truncation == "error":
        episode.recorder.truncated = True
        raise LimitError(
            "context_length_exceeded",
            f"the request has {characters} characters, which leaves no room: the maximum context length is "
            f"actor.max_tokens={limits.max_tokens}",
        )


async def _sent(
    http: web.Request, headers: Mapping[str, str], parts: Iterable[bytes], limit_s: float
) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers)
    try:
        async with asyncio.timeout(limit_s):
            await response.prepare(http)
            for each in parts:
                await response.write(each)
            await response.write_eof()
    except TimeoutError:
        if http.transport is not None:
            http.transport.abort()
    except ConnectionError:
        pass  # The client has closed its connection. The completion is recorded already.
    return response


async def _json(http: web.Request, bounds: Bounds) -> object:
    try:
        async with asyncio.timeout(bounds.body_s):
            body = await http.clone(client_max_size=bounds.body_bytes).json()
        if not nested_within(body, MAX_LEVELS):
            raise RefusedError(f"the body is nested in more than {MAX_LEVELS} levels")
        return encodable(body)
    except TimeoutError as error:
        raise RefusedError(f"the body did not come within {bounds.body_s:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedError(f"the body has more than {bounds.body_bytes} bytes") from error
    except (ValueError, LookupError, RecursionError, web.RequestPayloadError) as error:
        raise RefusedError("the body is not JSON") from error


def _error(api: Api, status: int, message: str, code: str) -> web.Response:
    return web.json_response(api.error(status, message, code), status=status)
