"""The HTTP server at which agents reach the policy. Each episode has an address and a key of its own.

A completion is recorded in the episode before it is sent. If the client closes its connection before that, as clients
do after a timeout, the request is cancelled and nothing of it is recorded.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from urllib.parse import quote

from aiohttp import web

from asyncrl.actor.chat import NO_FORMAT
from asyncrl.actor.chat_api.anthropic_messages import AnthropicMessages
from asyncrl.actor.chat_api.api import Api, Conversations, PolicyRequest
from asyncrl.actor.chat_api.chat_completions import ChatCompletions
from asyncrl.actor.chat_api.responses import Responses
from asyncrl.actor.episode import Episode
from asyncrl.actor.parsing import ParsedTurn
from asyncrl.actor.recorder import LimitError
from asyncrl.errors import RefusedError
from asyncrl.network.throttle import ErrorLogger
from asyncrl.text import encodable, reason_of

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 << 20

APIS: tuple[Api, ...] = (ChatCompletions(), Responses(), AnthropicMessages())


@dataclass(slots=True)
class ChatCounts:
    """Since the start: requests answered, refused, and abandoned (the client closed its connection before the answer
    was ready, or the episode ended), and branches with a completion. Of those answered: requests with settings that had
    no effect, completions for which the caller wanted a call, and those of them without one."""

    answered: int = 0
    refused: int = 0
    abandoned: int = 0
    branches: int = 0
    overridden: int = 0
    wanted_calls: int = 0
    unmet_calls: int = 0


@dataclass(eq=False)
class EpisodeEndpoint:
    """An episode that takes requests with its key. `fault` is an error of the engine, or of our own code, that failed a
    request; whatever the agent does then is not its fault."""

    episode: Episode
    api_key: str
    fault: Exception | None = None
    conversations: Conversations = field(default_factory=dict)


class EpisodeServer:
    """Answers from `start` to `close` at `host`; port 0 takes a free one."""

    def __init__(self, host: str, port: int) -> None:
        self.counts = ChatCounts()
        self._host = host
        self._port = port
        self._endpoints: dict[str, EpisodeEndpoint] = {}
        self._error_logger = ErrorLogger(log)
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        for api in APIS:
            app.router.add_post(f"/{{ticket}}/v1/{api.path}", partial(self._post, api))
        app.router.add_get("/{ticket}/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self._port = self._runner.addresses[0][1]
        log.info("agents are served at %s:%d", self._host, self._port)

    async def close(self) -> None:
        await self._runner.cleanup()

    def open(self, episode: Episode) -> tuple[EpisodeEndpoint, str]:
        """The endpoint of an episode, and its address, until `end`."""
        name = episode.ticket.id
        endpoint = self._endpoints[name] = EpisodeEndpoint(episode, secrets.token_urlsafe(16))
        return endpoint, f"http://{self._host}:{self._port}/{quote(name, safe='')}/v1"

    def end(self, episode: Episode) -> None:
        """The episode takes no more requests."""
        del self._endpoints[episode.ticket.id]
        episode.end()
        self.counts.branches += len(episode.recorder.last_completions())

    def counters(self) -> Mapping[str, float]:
        """Counts since the start."""
        return {f"chat_api_{name}": count for name, count in asdict(self.counts).items()}

    async def _models(self, http: web.Request) -> web.Response:
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "asyncrl"}
        if endpoint := self._permitted(http):
            model["max_model_len"] = endpoint.episode.limits.max_tokens
        return web.json_response({"object": "list", "data": [model]})

    def _permitted(self, http: web.Request) -> EpisodeEndpoint | None:
        """The endpoint to which the request's key belongs."""
        endpoint = self._endpoints.get(http.match_info["ticket"])
        key = http.headers.get("x-api-key") or http.headers.get("Authorization", "").removeprefix("Bearer ")
        if endpoint is None or not secrets.compare_digest(
            key.encode(errors="surrogateescape"), endpoint.api_key.encode()
        ):
            return None
        return endpoint

    async def _post(self, api: Api, http: web.Request) -> web.StreamResponse:
        endpoint = self._permitted(http)
        if endpoint is None:
            return _error(api, 401, "there is no such episode, or this is not its key", "invalid_api_key")
        try:
            request, answer = await self._answer(api, endpoint, await _json(http))
        except RefusedError as error:
            self.counts.refused += 1
            code = error.code if isinstance(error, LimitError) else "invalid_request_error"
            return _error(api, 400, str(error), code)
        except asyncio.CancelledError:
            self.counts.abandoned += 1
            raise
        except Exception as error:
            if endpoint.episode.is_over:
                self.counts.abandoned += 1
            else:
                endpoint.fault = error
                self._error_logger.exception(f"episode {endpoint.episode.ticket.id} fails: {reason_of(error)}", error)
            return _error(api, 503, str(error), "engine_error")
        return await _sent(api, http, request, answer) if request.stream else web.json_response(answer)

    async def _answer(
        self, api: Api, endpoint: EpisodeEndpoint, body: object
    ) -> tuple[PolicyRequest, Mapping[str, object]]:
        if not isinstance(body, dict):
            raise RefusedError("a request must be an object")
        episode, chat = endpoint.episode, endpoint.episode.chat
        request = api.read(body, endpoint.conversations)
        asked = request.completion._replace(messages=chat.with_thoughts(request.completion.messages))
        if asked.tools and chat.format is None:
            raise RefusedError(NO_FORMAT)
        functions = {tool["function"]["name"]: tool["function"] for tool in asked.tools}

        def read_turn(text: str, ended: bool) -> ParsedTurn:
            """All calls or none: a turn with a malformed call is text to the agent."""
            turn = chat.parse_apart(text, functions)
            return turn if turn.made else turn._replace(calls=(), ids=())

        completions = await episode.complete_all(asked, read_turn, request.count)
        self.counts.answered += 1
        self.counts.overridden += bool(request.overridden)
        if request.wants_call:
            self.counts.wanted_calls += len(completions)
            self.counts.unmet_calls += sum(not each.turn.made for each in completions)
        return request, api.answer(request, completions, chat, int(time.time()), endpoint.conversations)


async def _sent(
    api: Api, http: web.Request, request: PolicyRequest, answer: Mapping[str, object]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    for each in api.events(request, answer):
        await response.write(each)
    await response.write_eof()
    return response


async def _json(http: web.Request) -> object:
    try:
        return encodable(await http.json())
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedError(f"the body has more than {MAX_REQUEST_BYTES} bytes") from error
    except (ValueError, LookupError, RecursionError, web.RequestPayloadError) as error:
        raise RefusedError("the body is not JSON") from error


def _error(api: Api, status: int, message: str, code: str) -> web.Response:
    return web.json_response(api.error(status, message, code), status=status)
