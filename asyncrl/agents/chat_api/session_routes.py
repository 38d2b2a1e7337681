"""Answers the HTTP requests with which agents take, reward and end sessions."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from aiohttp import web

from asyncrl.agents.chat_api.sessions import MAX_WAIT_S, AgentSession, SessionOverError, Sessions
from asyncrl.errors import RefusedError
from asyncrl.network.http_server import shows_key

MAX_AT_ONCE = 256
"""The maximum number of requests of one session that may be unanswered at once. Requests for completions count, too."""

MAX_BODY_BYTES = 1 << 20

_UNKNOWN = "there is no such session, or this is not its key"

Read = Callable[[web.Request], Awaitable[object]]
"""Reads the body of a request as JSON. Raises RefusedError: the body is too large, comes too slowly, or is not JSON."""


class SessionRoutes:
    """Answers the requests about `sessions`. `read` reads the body of a request."""

    def __init__(self, sessions: Sessions, read: Read) -> None:
        self._sessions = sessions
        self._read = read

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post("/sessions", self._take)
        router.add_post("/sessions/{id}/reward", self._reward)
        router.add_post("/sessions/{id}/end", self._end)

    async def _take(self, http: web.Request) -> web.Response:
        if not self._sessions.permits(key_of(http)):
            return _refused(401, "this is not the key with which agents request episodes (actor.session_key)")
        shows_key(http)
        try:
            wait_s = _wait_s(await self._read(http) if http.can_read_body else {})
        except RefusedError as error:
            return _refused(400, str(error))
        session = await self._sessions.take(wait_s)
        if session is None:
            return web.Response(status=204)
        if http.transport is None or http.transport.is_closing():
            self._sessions.give_back(session)
            return web.Response(status=204)
        session.begin()
        # A proxy with TLS reaches this server by plain HTTP. The proxy's client must use https, to keep the key secret.
        scheme = http.headers.get("X-Forwarded-Proto", http.scheme)
        return web.json_response(session.describe(f"{'https' if scheme == 'https' else 'http'}://{http.host}"))

    async def _reward(self, http: web.Request) -> web.Response:
        return await self._reported(http, self._sessions.reward)

    async def _end(self, http: web.Request) -> web.Response:
        return await self._reported(http, self._sessions.end)

    async def _reported(self, http: web.Request, report: Callable[[AgentSession, object], None]) -> web.Response:
        session = self._sessions.find(http.match_info["id"], key_of(http))
        if session is None:
            return _refused(401, _UNKNOWN)
        shows_key(http)
        if session.in_flight >= MAX_AT_ONCE:
            return _refused(429, f"{session.in_flight} requests of this session are not answered yet")
        try:
            with self._sessions.at_work(session.id):
                report(session, await self._read(http) if http.can_read_body else {})
        except SessionOverError:
            return _refused(401, _UNKNOWN)
        except RefusedError as error:
            return _refused(400, str(error))
        return web.Response(status=204)


def key_of(http: web.Request) -> str:
    """The key of a request. It is in the header that one of the three protocols uses for keys."""
    return http.headers.get("x-api-key") or http.headers.get("Authorization", "").removeprefix("Bearer ")


def _wait_s(body: object) -> float:
    """Read the seconds to wait. Raises RefusedError: the body is malformed."""
    wait_s = body.get("wait_s", MAX_WAIT_S) if isinstance(body, dict) else None
    if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or not 0 <= wait_s < math.inf:
        raise RefusedError("wait_s in the body must be a finite number of seconds, 0 or more")
    return float(min(wait_s, MAX_WAIT_S))


def _refused(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
