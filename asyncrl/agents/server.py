"""Sends the requests of episodes to an environment server. The number of simultaneous episodes, the size of an answer
and the time for an answer are limited.

If a server is full or cannot be reached, the beginning of an episode is retried for `start_s` seconds. After that, the
episode fails, and is played again later. If the server is lost during an episode, the episode fails at once, because
only the server has the episode's state.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

import aiohttp

from asyncrl.config.variables import with_variables
from asyncrl.errors import ConfigError, UnavailableError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0
OPTIONS = "actor.agent_options"
CLOSING_S = 1.0
OVERLOADED = (429, 502, 503, 504)
"""The HTTP statuses that mean that a server is overloaded or down. A proxy in front of it may send them."""

T = TypeVar("T")


@dataclass(slots=True)
class ServerCounts:
    """Counts since the actor started.

    - `started`: episodes that began at the server; `unavailable`: failed attempts to begin an episode.
    - `lost`: episodes that failed because the server was lost or gave an invalid answer.
    - `errors`: refusals and errors of the server that were shown to the policy.
    """

    started: int = 0
    unavailable: int = 0
    lost: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of an environment server in `actor.agent_options`.

    - `url`: the address of the server.
    - `headers`: the headers of each request. $NAME in a header is replaced by the environment variable NAME.
    - `sessions`: the maximum number of episodes that one actor plays at the server at the same time.
    - `start_s`: the seconds within which an episode must begin.
    - `timeout_s`, `max_mb`: how many seconds the server may take for an answer, and how many megabytes the answer may
      have.
    - `max_chars`: how many characters of an observation the policy reads at most. The middle of a longer observation is
      cut out.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    sessions: int = 64
    start_s: float = 60.0
    timeout_s: float = 60.0
    max_mb: float = 16.0
    max_chars: int = 16_384

    def __post_init__(self) -> None:
        """Raises ConfigError: an option has an impossible value."""
        if not isinstance(self.url, str) or not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{OPTIONS}.url={self.url!r:.100}: give an address such as http://127.0.0.1:8000")
        if "@" in self.url.split("/")[2]:
            raise ConfigError(f"{OPTIONS}.url is logged: give a user name and a password in {OPTIONS}.headers instead")
        pairs = self.headers.items() if isinstance(self.headers, Mapping) else [(None, None)]
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise ConfigError(f"{OPTIONS}.headers: give a mapping of names to texts")
        for name in ("sessions", "start_s", "timeout_s", "max_mb", "max_chars"):
            value, whole = getattr(self, name), name in ("sessions", "max_chars")
            fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not fits or not 0 < value < math.inf:
                raise ConfigError(f"{OPTIONS}.{name}={value!r:.100}: give a {'whole ' * whole}number above 0")


class ServerReply(NamedTuple):
    """The answer of a server to a request."""

    status: int
    body: bytes

    def json(self) -> Mapping[str, Any]:
        """The body as an object. Raises UnavailableError: it is not a JSON object."""
        return read_object(self.body)


class EnvironmentServer:
    """Opens clients of the server that `options` describe. `clock` returns the time in seconds."""

    def __init__(self, options: ServerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self.counts = ServerCounts()
        self.max_bytes = int(options.max_mb * 2**20)
        self._url = options.url.rstrip("/")
        self._clock = clock
        self._slots = asyncio.Semaphore(options.sessions)

    def counters(self) -> Mapping[str, float]:
        """Counts since the actor started."""
        return {f"agent_server_{name}": count for name, count in asdict(self.counts).items()}

    @asynccontextmanager
    async def client(self) -> AsyncIterator[ServerClient]:
        """Open a client for one episode, with its own cookies. If `sessions` episodes are being played, wait until one
        of them ends."""
        headers = {
            name: with_variables(text, f"{OPTIONS}.headers.{name}", os.environ)
            for name, text in self.options.headers.items()
        }
        # Compressed answers are not requested: they may become arbitrarily large when they are unpacked.
        headers |= {"Accept-Encoding": "identity"}
        async with (
            self._slots,
            aiohttp.ClientSession(
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.CookieJar(unsafe=True),  # accepts cookies from numeric addresses too
                auto_decompress=False,
                trust_env=False,
                middlewares=(_without_redirections,),
            ) as http,
        ):
            yield ServerClient(http, self._url, self)

    async def begin(self, begin: Callable[[], Awaitable[T]]) -> T:
        """Call `begin`, which begins an episode, and call it again if it raises UnavailableError. Returns its result.

        Raises UnavailableError: `begin` still failed after `start_s` seconds. All other errors of `begin` are raised at
        once.
        """
        end, wait_s = self._clock() + self.options.start_s, FIRST_WAIT_S
        while True:
            try:
                begun = await begin()
            except UnavailableError as error:
                self.counts.unavailable += 1
                if self._clock() + wait_s > end:
                    raise UnavailableError(
                        f"the episode could not begin within {self.options.start_s:g} s: {error}"
                    ) from error
            else:
                self.counts.started += 1
                return begun
            await asyncio.sleep(wait_s)
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """Count an episode as lost if it fails with UnavailableError. The body of the `async with` statement plays the
        episode."""
        try:
            yield
        except UnavailableError:
            self.counts.lost += 1
            raise


class ServerClient:
    """Sends the requests of one episode to the `server`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, server: EnvironmentServer) -> None:
        self._http = http
        self._url = url
        self._timeout_s = server.options.timeout_s
        self._max_bytes = server.max_bytes

    async def request(self, method: str, path: str, body: Any = None) -> ServerReply:
        """Send a request and wait for its answer.

        Raises UnavailableError: no answer came, the answer is too large, or its status is one of OVERLOADED.
        """
        url = f"{self._url}/{path}"
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit, self._http.request(method, url, json=body) as response:
                if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                    raise UnavailableError(f"{url} compressed its answer, though the request forbids it")
                parts, size = [], 0
                async for part in response.content.iter_chunked(1 << 16):
                    parts.append(part)
                    size += len(part)
                    if size > self._max_bytes:
                        raise UnavailableError(f"{url} answered with more than {self._max_bytes} bytes")
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(self._why(url, limit, error)) from error
        reply = ServerReply(response.status, b"".join(parts))
        if reply.status in OVERLOADED:
            raise UnavailableError(f"{url} answered with status {reply.status}: {reply.body[:200]!r}")
        return reply

    async def socket(self, path: str) -> ServerSocket:
        """Open a WebSocket. Raises UnavailableError: the server cannot be reached."""
        url = f"{self._url}/{path}"
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                opened = await self._http.ws_connect(
                    url, max_msg_size=self._max_bytes, timeout=aiohttp.ClientWSTimeout(ws_close=CLOSING_S)
                )
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(self._why(url, limit, error)) from error
        return ServerSocket(opened, url, self._timeout_s)

    def _why(self, url: str, limit: asyncio.Timeout, error: Exception) -> str:
        if limit.expired():
            return f"{url} took more than {OPTIONS}.timeout_s={self._timeout_s:g}"
        # `repr` is used only if `str` is empty: the `repr` of some errors has the request's headers, which may contain
        # a key.
        return f"{url} cannot be reached: {str(error) or repr(error):.300}"


async def _without_redirections(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Refuse redirections: the headers may have a key, which must go only to the configured server."""
    response = await handler(request)
    if 300 <= response.status < 400:
        response.close()
        raise aiohttp.ClientError(f"it answered with status {response.status}, a redirection, which is not followed")
    return response


class ServerSocket:
    """A WebSocket on which each message has one answer."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str, timeout_s: float) -> None:
        self._socket = socket
        self._url = url
        self._timeout_s = timeout_s

    async def request(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message and wait for its answer, an object. Raises UnavailableError: no such answer came."""
        try:
            async with asyncio.timeout(self._timeout_s):
                # If the server has closed the connection, its last message may have the reason, and is read next.
                with suppress(aiohttp.ClientError):
                    await self._socket.send_json(message)
                received = await self._socket.receive()
        except TimeoutError as error:
            raise UnavailableError(f"{self._url} took more than {OPTIONS}.timeout_s={self._timeout_s:g}") from error
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise UnavailableError(f"{self._url} ended the connection ({received.type.name}: {received.data!s:.200})")
        return read_object(received.data)

    async def close(self) -> None:
        await self._socket.close()


def read_object(text: str | bytes) -> Mapping[str, Any]:
    """Read the JSON object in an answer. Raises UnavailableError: the answer is not a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnavailableError(f"the server's answer is not JSON: {text[:200]!r}") from error
    if not isinstance(found, dict):
        raise UnavailableError(f"the server answered with {found!r:.200}, not with an object")
    return found


def is_finite(value: Any) -> bool:
    """True if `value` is a number that a float can hold. The numbers of JSON may be larger."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def read_reward(value: Any) -> float | None:
    """Read the reward of an answer, which may be None. Raises UnavailableError: it is neither None nor a finite
    number."""
    if value is None:
        return None
    if not is_finite(value):
        raise UnavailableError(f"the server's reward is {value!r:.100}, not a finite number")
    return float(value)
