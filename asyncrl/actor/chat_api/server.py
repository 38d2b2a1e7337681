"""The chat-completions API for agents: an OpenAI-compatible endpoint for every episode, over any engine.

An endpoint's address contains its ticket's id, and it takes its own key only. A completion is recorded in the episode
before it is sent. If the client closes its connection before that, as clients do after a timeout, the request is
cancelled and nothing of it is recorded.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote

from aiohttp import web

from asyncrl.actor.chat_api.messages import as_events, completion_body, read_request
from asyncrl.actor.episode import Calls, Episode
from asyncrl.actor.parsing import MalformedCall, parse_tool_calls
from asyncrl.actor.recorder import LimitError
from asyncrl.errors import AsyncrlError, RefusedError
from asyncrl.text import encodable

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 << 20


@dataclass(slots=True)
class ChatCounts:
    """Since the start: requests answered, refused, and abandoned (the client closed its connection before the answer
    was ready, or the episode ended), and branches with a completion."""

    answered: int = 0
    refused: int = 0
    abandoned: int = 0
    branches: int = 0


@dataclass(eq=False)
class EpisodeEndpoint:
    """The address and the key of one episode. `fault` is an error of the engine, or of our own code, that failed a
    request; whatever the agent does then is not its fault."""

    episode: Episode
    base_url: str
    api_key: str
    fault: Exception | None = None


class ChatServer:
    """Serves episodes at `host`; port 0 takes a free one."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.counts = ChatCounts()
        self._host = host
        self._port = port
        self._endpoints: dict[str, EpisodeEndpoint] = {}
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

    @contextmanager
    def open(self, episode: Episode) -> Iterator[EpisodeEndpoint]:
        """An endpoint for `episode`, which is over afterwards."""
        name = episode.ticket.id
        url = f"http://{self._host}:{self._port}/{quote(name, safe='')}/v1"
        self._endpoints[name] = EpisodeEndpoint(episode, url, secrets.token_urlsafe(16))
        try:
            yield self._endpoints[name]
        finally:
            del self._endpoints[name]
            episode.end()
            self.counts.branches += len(episode.recorder.last_completions())

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
                unexpected = not isinstance(error, AsyncrlError)
                log.warning("episode %s fails: %s", endpoint.episode.ticket.id, error, exc_info=unexpected)
            return _error(503, str(error), "engine_error")

    async def _answer(self, episode: Episode, body: object) -> web.Response:
        request, stream = read_request(body)

        def read_calls(text: str, ended: bool) -> Calls:
            """All or none: a turn with a malformed call is text to the agent."""
            functions = {tool["function"]["name"]: tool["function"] for tool in request.tools}
            calls = parse_tool_calls(text, functions, episode.chat.one_call)
            return () if any(isinstance(call, MalformedCall) for call in calls) else calls

        completion = await episode.complete(request, read_calls)
        self.counts.answered += 1
        answer = completion_body(completion, created=int(time.time()))
        if stream:
            return web.Response(body=as_events(answer), content_type="text/event-stream")
        return web.json_response(answer)


async def _json(http: web.Request) -> object:
    try:
        return encodable(await http.json())
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedError(f"the body has more than {MAX_REQUEST_BYTES} bytes") from error
    except (ValueError, LookupError, RecursionError, web.RequestPayloadError) as error:
        raise RefusedError("the body is not JSON") from error


def _error(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": code, "code": code}}, status=status)
