"""Posts over plain HTTP to a server that writes the given bytes: in pieces, in every form of HTTP, and in none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from asyncrl.engine.fleet.http import Http, ServerRefusedError
from asyncrl.engine.fleet.plain_http import MOST_HEAD_BYTES, HttpAnswer, PlainHttp
from asyncrl.engine.fleet.server import ServerFaultError, ServerSilentError

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwell"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n3;x=1\r\nwel\r\n1\r\nl\r\n0\r\nX: y\r\n\r\n"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN
UNTIL_THE_END = b"HTTP/1.0 200 OK\r\n\r\nwell"
END = b""
"""A server that writes this closes its connection."""

Test = Callable[[PlainHttp, "Server"], Awaitable[None]]


class Server:
    """Answers each request with the next of `answers`, in pieces of `piece` bytes. Then it waits, or closes."""

    def __init__(self, answers: Sequence[bytes], piece: int) -> None:
        self.requests: list[bytes] = []
        self.opened = self.closed = 0
        self._answers = iter(answers)
        self._piece = piece

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = next(self._answers, END)
                for start in range(0, len(answer), self._piece):
                    writer.write(answer[start : start + self._piece])
                    await writer.drain()
                    await asyncio.sleep(0)
                if answer in (END, UNTIL_THE_END):
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.closed += 1
            writer.close()


def serve(test: Test, *answers: bytes, piece: int = 1 << 20, keep_s: float = 60.0) -> None:
    async def main() -> None:
        served = Server(answers, piece)
        server = await asyncio.start_server(served.connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = PlainHttp("127.0.0.1", port, f"127.0.0.1:{port}", keep_s, 60.0)
        try:
            async with asyncio.timeout(60.0):
                await test(connections, served)
        finally:
            connections.close()
            server.close()

    asyncio.run(main())


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("answer", [PLAIN, CHUNKED, CONTINUED], ids=["length", "chunked", "continued"])
def test_answers_are_read_whole_in_whatever_pieces_they_come(answer: bytes, piece: int) -> None:
    async def test(connections: PlainHttp, server: Server) -> None:
        assert await connections.post("/generate", b"{}") == HttpAnswer(200, b"well")
        assert await connections.post("/generate", b'{"a": 1}') == HttpAnswer(200, b"well")
        assert server.opened == 1
        assert server.requests[1].startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
        assert server.requests[1].endswith(b'Content-Type: application/json\r\nContent-Length: 8\r\n\r\n{"a": 1}')

    serve(test, answer, answer, piece=piece)


def test_an_answer_may_end_with_its_connection() -> None:
    async def test(connections: PlainHttp, server: Server) -> None:
        for _ in range(2):
            assert await connections.post("/", b"{}") == HttpAnswer(200, b"well")
        assert server.opened == 2

    serve(test, UNTIL_THE_END, UNTIL_THE_END)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.0 503 Busy\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 1\r\n\r\nx and more",
    ],
    ids=["it says so", "HTTP/1.0", "more than was announced"],
)
def test_a_connection_is_not_used_again_when_the_server_will_close_it(answer: bytes) -> None:
    async def test(connections: PlainHttp, server: Server) -> None:
        assert await connections.post("/", b"{}") == HttpAnswer(503, b"x")
        assert await connections.post("/", b"{}") == HttpAnswer(200, b"well")
        assert server.opened == 2

    serve(test, answer, PLAIN)


def test_a_connection_that_was_idle_too_long_is_not_used_again() -> None:
    async def test(connections: PlainHttp, server: Server) -> None:
        for _ in range(2):
            await connections.post("/", b"{}")
        assert server.opened == 2

    serve(test, PLAIN, PLAIN, keep_s=-1.0)


def call_with_new_transports(called: Callable[[asyncio.Transport], None]) -> None:
    """Call `called` with the transport of each connection that this loop opens from now on, before it is used."""
    loop = asyncio.get_running_loop()
    create_connection = loop.create_connection

    async def creating(*arguments: Any) -> tuple[Any, Any]:
        transport, protocol = await create_connection(*arguments)
        called(transport)
        return transport, protocol

    loop.create_connection = creating  # type: ignore[assignment]


def test_a_connection_that_has_just_failed_is_not_used_again() -> None:
    async def test(connections: PlainHttp, server: Server) -> None:
        opened: list[asyncio.Transport] = []
        call_with_new_transports(opened.append)
        await connections.post("/generate", b"{}")
        opened[0].abort()  # `connection_lost` is called only later.
        assert await connections.post("/generate", b"{}") == (200, b"well")
        assert server.opened == 2

    serve(test, PLAIN, PLAIN)


def test_a_connection_that_is_closed_before_its_first_request_is_a_fault_of_the_server() -> None:
    async def test(connections: PlainHttp, server: Server) -> None:
        call_with_new_transports(lambda transport: transport.abort())
        with pytest.raises(ConnectionResetError, match="before a request was sent"):
            await connections.post("/generate", b"{}")

    serve(test)


def test_requests_at_the_same_time_have_connections_of_their_own() -> None:
    async def test(connections: PlainHttp, server: Server) -> None:
        assert await asyncio.gather(*(connections.post("/", b"{}") for _ in range(3))) == [HttpAnswer(200, b"well")] * 3
        assert server.opened == 3
        await connections.post("/", b"{}")
        assert server.opened == 3

    serve(test, *[PLAIN] * 4)


@pytest.mark.parametrize(
    "answer",
    [
        END,
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"x" * (MOST_HEAD_BYTES + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["the end", "another protocol", "an endless head", "a chunk without a length"],
)
def test_an_answer_that_is_no_http_is_a_fault(answer: bytes) -> None:
    async def test(connections: PlainHttp, server: Server) -> None:
        with pytest.raises(ConnectionError):
            await connections.post("/", b"{}")
        assert await connections.post("/", b"{}") == HttpAnswer(200, b"well")

    serve(test, answer, PLAIN)


def test_a_cancelled_request_closes_its_connection() -> None:
    async def test(connections: PlainHttp, server: Server) -> None:
        request = asyncio.ensure_future(connections.post("/", b"{}"))
        while not server.requests:
            await asyncio.sleep(0.001)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        while not server.closed:
            await asyncio.sleep(0.001)

    serve(test, b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwel")


def test_closing_fails_the_requests_in_progress() -> None:
    async def test(connections: PlainHttp, server: Server) -> None:
        request = asyncio.ensure_future(connections.post("/", b"{}"))
        while not server.requests:
            await asyncio.sleep(0.001)
        connections.close()
        with pytest.raises(ConnectionAbortedError):
            await request

    serve(test, b"HTTP/1.0 200 OK\r\n\r\nwel")


def test_a_refused_request_is_told_from_a_faulty_server() -> None:
    async def main() -> None:
        served = Server([b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\nno"], 1)
        server = await asyncio.start_server(served.connected, "127.0.0.1", 0)
        http = Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/")
        with pytest.raises(ServerRefusedError, match="answered 400: no"):
            await http.post("/generate", {"a": 1})
        assert served.requests[0].startswith(b"POST /v1/generate HTTP/1.1\r\n")
        with pytest.raises(ServerFaultError, match="closed the connection"):
            await http.post("/generate", {"a": 1})
        await http.close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "url", ["https://server:1", "http://user:secret@server:1", "http://server:none", "http://sörver:1", "ftp://server"]
)
def test_other_servers_than_those_of_plain_http_are_left_to_aiohttp(url: str) -> None:
    assert Http(url)._direct is None


def test_the_reason_of_a_call_without_an_answer_names_the_time_limit() -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        http = Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(ServerSilentError, match=r"/server_info: no answer within 0\.05 s$"):
            await http.get("/server_info", 0.05)
        await http.close()
        server.close()

    asyncio.run(main())
