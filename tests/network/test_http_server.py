"""Clients without a key at a real server over real sockets. Only the time is the test's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from aiohttp import web

from asyncrl.network.http_server import ConnectionBounds, HttpServer, Later, shows_key
from tests.helpers import GENEROUS_S, async_until

BOUNDS = ConnectionBounds(connections=8, stranger_s=10.0, idle_s=100.0)
LARGE = 64 << 20
"""More bytes than the buffers of both sides hold."""


class Clock:
    """Timers that ring when the test moves the time on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: dict[Timer, Callable[[], None]] = {}

    def later(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> Timer:
        timer = Timer(self.now + seconds, self)
        self._due[timer] = lambda: callback(*arguments)
        return timer

    def drop(self, timer: Timer) -> None:
        self._due.pop(timer, None)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for timer in [each for each in self._due if each.at <= self.now]:
            self._due.pop(timer)()

    @property
    def set(self) -> int:
        return len(self._due)


class Timer:
    def __init__(self, at: float, clock: Clock) -> None:
        self.at = at
        self._clock = clock

    def cancel(self) -> None:
        self._clock.drop(self)


class Served:
    """The server, whose requests have a key if their header X-Key is "right", and its clock."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.clock = Clock()
        self.log = logging.Logger("served")
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.answered = 0
        self.http = HttpServer(app, bounds, self.log, "no request", 0.1, cast(Later, self.clock.later))
        self.port: int

    async def _answer(self, request: web.Request) -> web.Response:
        if request.headers.get("X-Key") != "right":
            return web.Response(status=401, text="refused")
        shows_key(request)
        await request.read()
        await self.go_on.wait()
        self.answered += 1
        return web.Response(body=b"x" * LARGE if request.path == "/large" else b"served")

    async def client(self) -> Client:
        """A new connection, which the server has accepted, or turned away."""
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def keyed(self) -> Client:
        """A connection that has shown a key."""
        client = await self.client()
        assert await client.is_served()
        return client

    async def strangers(self, count: int) -> list[Client]:
        """Connections that the server has."""
        before = self.clock.set
        clients = [await self.client() for _ in range(count)]
        await async_until(lambda: self.clock.set == before + count, GENEROUS_S)
        return clients


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, key: str = "", path: str = "/", body: bytes = b"", more: str = "") -> None:
        self.writer.write(head(key, path, f"Content-Length: {len(body)}\r\n{more}").encode() + body)

    async def answer(self) -> bytes:
        """The first answer that is still to be read, with the length of a short one."""
        async with asyncio.timeout(GENEROUS_S):
            found = await self.reader.readuntil(b"\r\n\r\n")
            length = next(line for line in found.split(b"\r\n") if line.lower().startswith(b"content-length: "))
            return found + await self.reader.readexactly(int(length.split()[1]))

    async def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        async with asyncio.timeout(GENEROUS_S):
            found = b""
            try:
                while part := await self.reader.read(1 << 16):
                    found += part
            except ConnectionError:
                pass
            return found

    async def is_served(self) -> bool:
        self.send("right")
        return (await self.answer()).endswith(b"served")


def head(key: str = "", path: str = "/", more: str = "") -> str:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Key: {key}\r\n{more}\r\n"


@asynccontextmanager
async def served(bounds: ConnectionBounds = BOUNDS) -> AsyncIterator[Served]:
    server = Served(bounds)
    server.port = await server.http.start(host="127.0.0.1", port=0)
    try:
        yield server
    finally:
        await server.http.close()
    assert (server.http.connections, server.clock.set) == (0, 0)


HALVES = {
    "nothing": "",
    "half a header": "POST / HTTP/1.1\r\nHost: ",
    "a header without its end": "POST / HTTP/1.1\r\nHost: x\r\nX-Key: right\r\n",
}


@pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
async def test_a_stranger_that_sends_no_whole_request_is_closed_in_time(sent: str) -> None:
    async with served() as server:
        (stranger,) = await server.strangers(1)
        stranger.writer.write(sent.encode())
        server.clock.advance(9.0)
        assert server.http.connections == 1
        server.clock.advance(1.0)
        assert await stranger.rest() == b""
        assert server.http.connections == 0


async def test_bytes_that_drip_do_not_prolong_the_time_of_a_stranger() -> None:
    async with served() as server:
        (stranger,) = await server.strangers(1)
        for byte in head("right").encode()[:9]:
            stranger.writer.write(bytes([byte]))
            await stranger.writer.drain()
            server.clock.advance(1.0)
        assert server.http.connections == 1
        server.clock.advance(1.0)
        assert await stranger.rest() == b""


async def test_a_refused_key_ends_its_connection_so_that_no_second_request_can_hold_it() -> None:
    async with served() as server:
        (stranger,) = await server.strangers(1)
        stranger.send("wrong")
        stranger.writer.write(b"POST / HTTP/1.1\r\nHost: ")
        found = await stranger.rest()
        assert found.count(b"HTTP/1.1 401") == 1
        assert b"Connection: close" in found
        await async_until(lambda: server.http.connections == 0, GENEROUS_S)


async def test_a_stranger_gets_one_answer_whatever_it_pipelines() -> None:
    async with served() as server:
        (stranger,) = await server.strangers(1)
        stranger.writer.write((head("wrong") * 20 + head("right")).encode())
        assert (await stranger.rest()).count(b"HTTP/1.1") == 1
        assert server.answered == 0


@pytest.mark.slow
async def test_a_refused_body_that_does_not_come_ends_its_connection() -> None:
    async with served() as server:
        (stranger,) = await server.strangers(1)
        stranger.writer.write(head("wrong", more="Content-Length: 1000\r\n").encode() + b"{")
        assert b"HTTP/1.1 401" in await stranger.rest()
        await async_until(lambda: server.http.connections == 0, GENEROUS_S)


async def test_a_refused_body_without_an_end_is_cut_off_when_its_time_is_over() -> None:
    async with served() as server:
        (stranger,) = await server.strangers(1)
        stranger.writer.write(head("wrong", more="Transfer-Encoding: chunked\r\n").encode() + b"5\r\nab")
        assert b"HTTP/1.1 401" in await stranger.answer()
        server.clock.advance(10.0)
        assert server.http.connections == 0


async def test_the_time_begins_again_after_each_answer_to_a_key() -> None:
    async with served() as server:
        client = await server.client()
        for _ in range(3):
            assert await client.is_served()
            server.clock.advance(99.0)
            assert server.http.connections == 1
        server.clock.advance(1.0)
        assert await client.rest() == b""


@pytest.mark.parametrize("sent", HALVES.values(), ids=HALVES)
async def test_half_a_request_after_a_good_answer_is_closed_in_time(sent: str) -> None:
    async with served() as server:
        client = await server.keyed()
        client.writer.write(sent.encode())
        server.clock.advance(100.0)
        assert await client.rest() == b""
        assert server.http.connections == 0


async def test_a_refused_key_does_not_count_as_heard_on_a_connection_that_had_a_good_one() -> None:
    async with served() as server:
        client = await server.keyed()
        for _ in range(4):
            server.clock.advance(20.0)
            client.send("wrong")
            assert b"HTTP/1.1 401" in await client.answer()
        server.clock.advance(20.0)
        assert await client.rest() == b""


async def test_a_request_with_a_key_may_take_as_long_as_it_takes() -> None:
    async with served() as server:
        server.go_on.clear()
        client = await server.client()
        client.send("right")
        await async_until(lambda: server.clock.set == 0 and server.http.connections == 1, GENEROUS_S)
        server.clock.advance(10_000.0)
        server.go_on.set()
        assert (await client.answer()).endswith(b"served")


async def test_requests_with_a_key_may_be_pipelined() -> None:
    async with served() as server:
        client = await server.client()
        client.writer.write(head("right").encode() * 5)
        for _ in range(5):
            assert (await client.answer()).endswith(b"served")


@pytest.mark.slow
async def test_an_answer_that_is_not_read_ends_its_connection_in_time() -> None:
    async with served() as server:
        client = await server.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send("right", "/large")
        await async_until(lambda: server.answered == 1 and server.clock.set == 1, GENEROUS_S)
        server.clock.advance(100.0)
        assert server.http.connections == 0
        client.writer.close()


async def test_a_key_is_served_whatever_strangers_do() -> None:
    async with served() as server:
        keyed = [await server.keyed() for _ in range(4)]
        room = BOUNDS.connections - len(keyed)
        strangers = await server.strangers(room)
        for each in strangers:
            each.writer.write(b"POST / HTTP/1.1\r\n")
        keyed.append(await server.keyed())
        assert await strangers[0].rest() == b""
        strangers += [await server.client() for _ in range(10 * room)]
        for each in [*keyed, await server.client()]:
            assert await each.is_served()
        assert server.http.connections <= BOUNDS.connections
        for each in strangers[:-room]:
            assert await each.rest() == b""


async def test_as_many_clients_as_there_may_be_can_connect_at_once_and_show_their_keys_later() -> None:
    async with served() as server:
        clients = await server.strangers(BOUNDS.connections)
        for each in clients:
            assert await each.is_served()


async def test_a_connection_beyond_all_is_turned_away_only_where_all_others_have_keys() -> None:
    async with served() as server:
        keyed = [await server.keyed() for _ in range(BOUNDS.connections)]
        late = await server.client()
        assert await late.rest() == b""
        keyed.pop().writer.close()
        await async_until(lambda: server.http.connections < BOUNDS.connections, GENEROUS_S)
        (stranger,) = await server.strangers(1)
        assert await (await server.client()).is_served()
        assert await stranger.rest() == b""


@pytest.mark.slow
async def test_bytes_that_are_no_request_are_one_bounded_line_and_then_counted() -> None:
    async with served() as server:
        lines: list[str] = []

        def keep(record: logging.LogRecord) -> bool:
            lines.append(f"{record.getMessage()}{record.exc_info or ''}")
            return False

        server.log.addFilter(keep)
        for number in range(100):
            client = await server.client()
            client.writer.write(b"\0\x1b[31m" + b"x" * 9000 + b"\r\n\r\n")
            assert b"400" in await client.rest(), number
        assert 1 <= len(lines) < 100
        assert all(len(line) < 1000 and line.isprintable() and line.startswith("no request") for line in lines)
