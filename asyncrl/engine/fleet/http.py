"""HTTP calls to one server. A call raises one error if the server fails, and another one if the server refuses the
request."""

from __future__ import annotations

import io
from typing import Any

import aiohttp
import msgspec

from asyncrl.engine.fleet.server import ServerFaultError
from asyncrl.errors import EngineError

CONNECT_S = 10.0
KEEP_ALIVE_S = 2.0
"""Seconds after which this client closes an idle connection. Servers close idle connections later (uvicorn after 5 s).
If a server closed a connection first, a request sent at that moment would fail."""

_HEADERS = {"Content-Type": "application/json"}
_NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
_BUSY = (408, 429)
_LARGE = 1 << 16
"""Bodies with more bytes than this are sent in pieces, so that the event loop can do other work in between."""


class ServerRefusedError(EngineError):
    """The server refused the request; the message has the reason."""


class Http:
    """Calls to the server at `url`; connections are opened as needed."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, path: str, timeout_s: float) -> Any:
        """Get the answer, decoded if it is JSON. Raises: see `call`."""
        return decoded(await self.call("GET", path, None, timeout_s))

    async def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Post `body`, as JSON unless it is bytes, and get the answer, decoded if it is JSON. Raises: see `call`."""
        data = body if isinstance(body, bytes) else msgspec.json.encode({} if body is None else body)
        return decoded(await self.call("POST", path, data, timeout_s))

    async def call(self, method: str, path: str, data: bytes | None = None, timeout_s: float | None = None) -> bytes:
        """Send a request and return the body of the answer. `timeout_s` None: no time limit.

        Raises ServerRefusedError: the status is 4xx, except 408 and 429, which mean a busy server. Raises
        ServerFaultError: there is no answer, or one with any other status than 200.
        """
        if self._closed:
            raise ServerFaultError(f"the connection to {self._url} has been closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        url = self._url + path
        timeout = _NO_LIMIT if timeout_s is None else aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        body = io.BytesIO(data) if data and len(data) > _LARGE else data
        try:
            async with self._session.request(method, url, data=body, headers=_HEADERS, timeout=timeout) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerFaultError(f"{url}: {error or type(error).__name__}") from error
        if response.status != 200:
            refused = 400 <= response.status < 500 and response.status not in _BUSY
            kind = ServerRefusedError if refused else ServerFaultError
            raise kind(f"{url} answered {response.status}: {answer[:500].decode(errors='replace')}")
        return answer

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()


def decoded(answer: bytes) -> Any:
    """Decode JSON; an answer that is not JSON is returned as text."""
    try:
        return msgspec.json.decode(answer)
    except (ValueError, RecursionError):
        return answer.decode(errors="replace")
