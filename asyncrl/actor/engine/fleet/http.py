"""JSON calls to one server. What goes wrong is told apart: the server failed, or it refused this request."""

from __future__ import annotations

import io
import json
from typing import Any

import aiohttp

from asyncrl.actor.engine.fleet.server import ServerFaultError
from asyncrl.errors import EngineError

CONNECT_S = 10.0
KEEP_ALIVE_S = 2.0
"""Less than servers keep an idle connection (uvicorn: 5 s), so that no request meets one that is being closed."""

_BUSY = (408, 429)


class ServerRefusedError(EngineError):
    """The server understood the request and refused it; the message has its reason."""


class Http:
    """Calls to the server at `url`; connections are opened as needed."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, path: str, timeout_s: float) -> Any:
        return await self.call("GET", path, None, timeout_s)

    async def post(self, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """The decoded answer to `body`, which is encoded here unless it is bytes; no limit of time by default.

        Raises ServerFaultError (no answer, or an answer of 5xx) and ServerRefusedError (an answer of 4xx).
        """
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        return await self.call("POST", path, data, timeout_s)

    async def call(self, method: str, path: str, data: bytes | None, timeout_s: float | None) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._open().request(
                method, self._url + path, data=io.BytesIO(data) if data else None, headers=headers, timeout=timeout
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerFaultError(f"{self._url}{path}: {error or type(error).__name__}") from error
        if 400 <= response.status < 500 and response.status not in _BUSY:
            raise ServerRefusedError(f"{self._url}{path} answered {response.status}: {text[:500]}")
        if response.status != 200:
            raise ServerFaultError(f"{self._url}{path} answered {response.status}: {text[:500]}")
        return _decoded(text)

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise ServerFaultError(f"the fleet has parted from {self._url}")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()


def _decoded(text: str) -> Any:
    """JSON where it is JSON, else the text: some answers are a plain sentence."""
    try:
        return json.loads(text)
    except ValueError:
        return text
