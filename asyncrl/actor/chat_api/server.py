"""The door itself: an OpenAI-compatible address for every episode, over any engine.

An episode's address has its ticket's id in it and takes only its own key. What the agent asks is sampled by the engine
and recorded in the episode's conversation before it is answered. An agent that hangs up before its answer is ready, as
impatient clients do to try again, ends its request, which leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import quote

from aiohttp import web

from asyncrl.actor.chat import Chat
from asyncrl.actor.chat_api.branch import Branch
from asyncrl.actor.chat_api.conversation import Conversation, ConversationLimits, LimitError, Place
from asyncrl.actor.chat_api.counts import DoorCounts
from asyncrl.actor.chat_api.messages import Ask, answer_message, as_events, calls_in, completion, read_answer, read_ask
from asyncrl.actor.engine.base import Engine, Generation
from asyncrl.errors import AsyncrlError, BusyError, EngineError, RefusedError, StoppedError
from asyncrl.text import encodable
from asyncrl.types import Sampling, Ticket

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 << 20

_OVER = "the episode is over"


@dataclass(eq=False)
class Seat:
    """One episode at the door. `fault` is what the engine or we did not do: the agent is not to blame for what follows.
    `settled` is set whenever a request has ended, `closed` once the agent is done."""

    ticket: Ticket
    base_url: str
    api_key: str
    conversation: Conversation
    generate_s: float = 0.0
    fault: Exception | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False


class Door:
    """Conversations over `engine` at `host`, within `limits` each; port 0 takes a free one. `clock` gives seconds."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        limits: ConversationLimits,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
        as_rendered: bool = False,
    ) -> None:
        self.counts = DoorCounts()
        self._engine = engine
        self._chat = chat
        self._limits = limits
        self._as_rendered = as_rendered
        self._host = host
        self._port = port
        self._clock = clock
        self._seats: dict[str, Seat] = {}
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

    @asynccontextmanager
    async def open(self, ticket: Ticket) -> AsyncIterator[Seat]:
        """A seat for the episode of `ticket`; afterwards nothing more is answered there."""
        conversation = Conversation(ticket.id, self._chat, self._limits, self._as_rendered)
        url = f"http://{self._host}:{self._port}/{quote(ticket.id, safe='')}/v1"
        seat = self._seats[ticket.id] = Seat(ticket, url, secrets.token_urlsafe(16), conversation)
        try:
            yield seat
        finally:
            seat.closed = True
            seat.settled.set()
            del self._seats[ticket.id]
            for branch in conversation.branches:
                self._engine.release(branch.name)
            self.counts.branches += len(conversation.answered())

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "asyncrl"}]}
        )

    async def _chat_completions(self, http: web.Request) -> web.Response:
        seat = self._seats.get(http.match_info["ticket"])
        key = http.headers.get("Authorization", "").removeprefix("Bearer ")
        if seat is None or not secrets.compare_digest(key.encode(errors="surrogateescape"), seat.api_key.encode()):
            return _error(401, "there is no such episode, or this is not its key", "invalid_api_key")
        try:
            ask = read_ask(await _json(http))
            place = await _place(seat, ask)
            return await self._answer(seat, place)
        except RefusedError as error:
            self.counts.refused += 1
            return _error(400, str(error), error.code if isinstance(error, LimitError) else "invalid_request_error")
        except Exception as error:
            if not seat.closed:
                seat.fault = error
                unexpected = not isinstance(error, AsyncrlError)
                log.warning("episode %s fails: %s", seat.ticket.id, error, exc_info=unexpected)
            return _error(503, str(error), "engine_error")

    async def _answer(self, seat: Seat, place: Place) -> web.Response:
        """The place is recorded or, whatever is raised, withdrawn."""
        ask, conversation, seen = place.ask, seat.conversation, len(place.branch.tokens)
        try:
            generation = await self._generate(seat, place.branch)
            ended = generation.finish_reason == "stop"
            text = self._chat.text(generation.tokens[:-1] if ended else generation.tokens)
            calls = calls_in(text, ask.tools, self._chat.one_call)
            message = answer_message(text, calls)
            conversation.record(place, generation, read_answer(message), calls)
        except BaseException as error:
            self.counts.abandoned += seat.closed or isinstance(error, asyncio.CancelledError)
            if session := conversation.withdraw(place):
                self._engine.release(session)
            raise
        finally:
            seat.settled.set()
        self.counts.answered += 1
        body = completion(message, generation.finish_reason, seen, len(generation.tokens), created=int(time.time()))
        if ask.stream:
            return web.Response(body=as_events(body), content_type="text/event-stream")
        return web.json_response(body)

    async def _generate(self, seat: Seat, branch: Branch) -> Generation:
        """Raises EngineError: the engine gave nothing. Raises StoppedError: the episode has ended meanwhile."""
        sampling = Sampling(seat.ticket.temperature, branch.reserved)
        started = self._clock()
        generation = await self._engine.generate(branch.tokens, sampling, self._chat.stop_ids, branch.name)
        if seat.closed:
            raise StoppedError(_OVER)
        if generation.finish_reason == "abort" or not len(generation.tokens):
            raise EngineError("the engine aborted the generation")
        seat.generate_s += self._clock() - started
        return generation


async def _place(seat: Seat, ask: Ask) -> Place:
    """Where the answer will stand, as soon as it is known whether there is room for it."""
    while not seat.closed:
        with suppress(BusyError):
            return seat.conversation.prepare(ask)
        seat.settled.clear()
        await seat.settled.wait()
    raise StoppedError(_OVER)


async def _json(http: web.Request) -> object:
    with suppress(ValueError, RecursionError):
        return encodable(await http.json())
    raise RefusedError("the body is not JSON")


def _error(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": code, "code": code}}, status=status)
