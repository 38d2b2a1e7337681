"""HTTP calls to one server. A call raises one error if the server fails, and another one if the server refuses the
request.

Posts without a time limit, which sample turns, go through `plain_http` if the server is reached by plain HTTP. All
other calls go through aiohttp."""

from __future__ import annotations

import io
import re
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from asyncrl.engine.fleet.plain_http import HttpAnswer, PlainHttp
from asyncrl.engine.fleet.server import ServerFaultError, ServerSilentError
from asyncrl.errors import EngineError

CONNECT_S = 10.0
KEEP_ALIVE_S = 2.0
"""Seconds after which this client closes an idle connection. Servers close idle connections later (uvicorn after 5 s).
If a server closed a connection first, a request sent at that moment would fail."""

_HEADERS = {"Content-Type": "application/json"}
_NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
_BUSY = (408, 429)
_NEEDS_QUOTING = re.compile(r"[^!-~]|[?#]")
_REDIRECTS = (301, 302, 303, 307, 308)
_LARGE = 1 << 16
"""aiohttp sends bodies with more bytes than this in pieces, so that the event loop can do other work in between."""


class ServerRefusedError(EngineError):
    """The server refused the request; the message has the reason."""


class Http:
    """Calls to the server at `url`; connections are opened as needed."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._direct, self._prefix = _direct(self._url)
        self._closed = False

    async def get(self, path: str, timeout_s: float) -> Any:
        """Get the answer, decoded if it is JSON. Raises: see `call`."""
        return decoded(await self.call("GET", path, None, timeout_s))

    async def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Post `body`, as JSON unless it is bytes. Returns the answer, decoded if it is JSON. Raises: see `call`."""
        data = body if isinstance(body, bytes) else msgspec.json.encode({} if body is None else body)
        return decoded(await self.call("POST", path, data, timeout_s))

    async def call(self, method: str, path: str, data: bytes | None = None, timeout_s: float | None = None) -> bytes:
        """Send a request and return the body of the answer. `timeout_s` None: no time limit.

        Raises ServerRefusedError: the status is 4xx, except 408 and 429, which mean a busy server. Raises
        ServerFaultError: there is no answer, or one with any other status than 200. ServerSilentError: there is no
        answer in time.
        """
        if self._closed:
            raise ServerFaultError(f"the connection to {self._url} has been closed")
        url = self._url + path
        try:
            status, answer = await self._answer(method, path, data, timeout_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error, TimeoutError) and timeout_s is not None:
                raise ServerSilentError(f"{url}: {str(error) or f'no answer within {timeout_s:g} s'}") from error
            raise ServerFaultError(f"{url}: {str(error) or type(error).__name__}") from error
        if status != 200:
            refused = 400 <= status < 500 and status not in _BUSY
            kind = ServerRefusedError if refused else ServerFaultError
            raise kind(f"{url} answered {status}: {answer[:500].decode(errors='replace')}")
        return answer

    async def _answer(self, method: str, path: str, data: bytes | None, timeout_s: float | None) -> HttpAnswer:
        if self._direct is not None and method == "POST" and timeout_s is None and data is not None:
            answer = await self._direct.post(self._prefix + path, data)
            if answer.status not in _REDIRECTS:
                return answer
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        timeout = _NO_LIMIT if timeout_s is None else aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        body = io.BytesIO(data) if data and len(data) > _LARGE else data
        url = self._url + path
        async with self._session.request(method, url, data=body, headers=_HEADERS, timeout=timeout) as response:
            return HttpAnswer(response.status, await response.read())

    async def close(self) -> None:
        self._closed = True
        if self._direct is not None:
            self._direct.close()
        if self._session is not None:
            await self._session.close()


def _direct(url: str) -> tuple[PlainHttp | None, str]:
    """The connections to the server at `url`, and the path of its URL. None if only aiohttp can reach the server: by
    https, with a password, or at an address that needs quoting."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        return None, ""
    if parts.scheme != "http" or not host or "@" in parts.netloc or _NEEDS_QUOTING.search(url):
        return None, ""
    return PlainHttp(host, port, parts.netloc, KEEP_ALIVE_S, CONNECT_S), parts.path


def decoded(answer: bytes) -> Any:
    """Decode JSON; an answer that is not JSON is returned as text."""
    try:
        return msgspec.json.decode(answer)
    except (ValueError, RecursionError):
        return answer.decode(errors="replace")
