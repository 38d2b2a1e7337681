"""An HTTP server whose clients show keys. Clients without a key cannot keep the server from serving clients with a key.

- A connection is a stranger's until one of its requests has a key. The application reports this by a call of
  `shows_key`. A stranger's connection is closed after one answer, and at the latest `stranger_s` seconds after it was
  opened, even if the stranger keeps sending.
- If the number of connections is at its bound, a new connection closes the oldest connection of a stranger. Strangers
  have no separate, lower bound: at the start of a run thousands of agents may connect at once, and show their keys
  later.
- After each request with a key, the whole of the next request must arrive within `idle_s` seconds. Within the same time
  the client must read the answer to the earlier request. Requests without a key do not extend this time.

Bytes that are not a request, and errors of the application, are logged at a bounded rate.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from asyncrl.network.throttle import ErrorLogger, Throttled
from asyncrl.text import reason_of

Later = Callable[..., asyncio.TimerHandle]
"""Calls a function with arguments after some seconds, as `call_later` of an event loop does."""

LINGERING_S = 1.0
"""The seconds for which the server goes on reading a request's body that the application has not read to its end. A
client that is cut off while it sends the body does not get the answer."""


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """The bounds on connections.

    - `connections`: the maximum number of connections.
    - `stranger_s`: the seconds after which the connection of a stranger is closed.
    - `idle_s`: the seconds after which the idle connection of a client with a key is closed.
    """

    connections: int = 4096
    stranger_s: float = 30.0
    idle_s: float = 300.0


class HttpServer:
    """Serves `app` from `start` to `close`. Log lines about bytes that are not a request begin with `what`. If `later`
    is None, the event loop's `call_later` is used."""

    def __init__(
        self,
        app: web.Application,
        bounds: ConnectionBounds,
        logger: logging.Logger,
        what: str,
        shutdown_s: float = 1.0,
        later: Later | None = None,
    ) -> None:
        app.middlewares.insert(0, _timed)
        app.on_response_prepare.append(_one_answer_for_strangers)
        self._runner = web.AppRunner(app, shutdown_timeout=shutdown_s, handler_cancellation=True)
        self._bounds = bounds
        self._logger = _bounded_log(Throttled(logger, what), ErrorLogger(logger))
        self._later = later
        self._strangers: dict[_Connection, None] = {}
        """The connections of strangers, the oldest first. The values have no meaning."""
        self._known: set[_Connection] = set()
        self._listener: asyncio.Server | None = None

    async def start(self, **at: Any) -> int:
        """Listen at a `host` and `port`, or at a bound `sock`. Returns the port. Raises OSError: the server cannot
        listen there. After this error, `start` may be called again.
        """
        loop = asyncio.get_running_loop()
        if self._runner.server is None:
            await self._runner.setup()
        self._later = self._later or loop.call_later
        self._listener = await loop.create_server(self._connection, **at, backlog=128)
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        for connection in [*self._strangers, *self._known]:
            self.cut(connection)

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._strangers) + len(self._known)

    def _connection(self) -> RequestHandler:
        assert self._runner.server is not None
        return _Connection(self, self._runner.server, self._logger)

    def admit(self, connection: _Connection) -> bool:
        """Register a new connection. Returns False if there is no room."""
        if self.connections >= self._bounds.connections:
            if not self._strangers:
                return False
            self.cut(next(iter(self._strangers)))
        self._strangers[connection] = None
        self._limit(connection, self._bounds.stranger_s)
        return True

    def is_stranger(self, connection: _Connection) -> bool:
        """True if no request of `connection` had a key."""
        return connection in self._strangers

    def begin(self, connection: _Connection) -> None:
        """Record that the answer to a request with a key begins. This answer has no time limit."""
        self._stop_limit(connection)
        if connection in self._strangers:
            del self._strangers[connection]
            self._known.add(connection)

    def end(self, connection: _Connection) -> None:
        """Record that the application has answered a request."""
        if connection in self._known and connection.limit is None:
            self._limit(connection, self._bounds.idle_s)

    def cut(self, connection: _Connection) -> None:
        """Close a connection at once. An orderly close would wait until all answers are read."""
        self.forget(connection)
        connection.force_close()
        connection.wire.abort()

    def forget(self, connection: _Connection) -> None:
        """Forget a closed connection."""
        self._stop_limit(connection)
        self._strangers.pop(connection, None)
        self._known.discard(connection)

    def _limit(self, connection: _Connection, seconds: float) -> None:
        assert self._later is not None
        connection.limit = self._later(seconds, self.cut, connection)

    def _stop_limit(self, connection: _Connection) -> None:
        if connection.limit is not None:
            connection.limit.cancel()
            connection.limit = None


class _Connection(RequestHandler):
    """A connection to `owner`. `limit` is the timer that will close it. It is None while a request with a key is being
    answered."""

    __slots__ = ("limit", "owner", "wire")

    def __init__(self, owner: HttpServer, manager: web.Server, logger: logging.Logger) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(manager, loop=loop, logger=logger, access_log=cast(Any, None), lingering_time=LINGERING_S)
        self.owner = owner
        self.limit: asyncio.TimerHandle | None = None
        self.wire: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.wire = cast(asyncio.Transport, transport)
        if self.owner.admit(self):
            super().connection_made(transport)
        else:
            self.wire.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.owner.forget(self)
        super().connection_lost(exc)


def shows_key(request: web.Request) -> None:
    """Record that the request has a key. Its connection is no longer a stranger's, and its answer has no time limit."""
    connection = cast(_Connection, request.protocol)
    connection.owner.begin(connection)


@web.middleware
async def _timed(request: web.Request, handler: Handler) -> web.StreamResponse:
    connection = cast(_Connection, request.protocol)
    try:
        return await handler(request)
    finally:
        connection.owner.end(connection)


async def _one_answer_for_strangers(request: web.Request, response: web.StreamResponse) -> None:
    connection = cast(_Connection, request.protocol)
    if connection.owner.is_stranger(connection):
        response.force_close()
        # aiohttp has made the headers already, and would close the connection without announcing it.
        response.headers["Connection"] = "close"


def _bounded_log(unreadable: Throttled, errors: ErrorLogger) -> logging.Logger:
    """Return a logger for aiohttp's messages. Any client can send bytes that are not a request, so the rate of lines
    about such bytes is bounded."""
    logger = logging.Logger(__name__)

    def say(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or isinstance(error, HttpProcessingError | web.RequestPayloadError):
            unreadable.say(record.getMessage() if error is None else reason_of(error))
        else:
            errors.exception(f"a request failed: {reason_of(error)!r:.500}", error)
        return False

    logger.addFilter(say)
    return logger
