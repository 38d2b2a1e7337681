"""Posts requests to one server over plain HTTP/1.1, with as little processor time as possible.

Each turn of each episode is such a request. With aiohttp's client, the request took a quarter of the processor time
that an actor spends on a turn. This client takes a third of aiohttp's time, since it does less: the body is bytes, and
the answer is read whole. `Http` uses this client for requests that wait for sampling, and aiohttp for everything else,
such as https.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import NamedTuple

MOST_HEAD_BYTES = 1 << 16
"""The maximum number of bytes of an answer's status line and headers."""

_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})[ \r]")
# These are searched in lower case, which is faster than a search that ignores case.
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n")
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r]*\bchunked[ \t]*\r\n")
_CLOSES = re.compile(rb"\r\nconnection:[^\r]*\bclose\b")
_KEEPS = re.compile(rb"\r\nconnection:[^\r]*\bkeep-alive\b")
_CHUNK = re.compile(rb"([0-9a-fA-F]+)[^\r\n]*\r\n")


class HttpAnswer(NamedTuple):
    """The status of an answer, and its body."""

    status: int
    body: bytes


class PlainHttp:
    """The connections to the server at `host` and `port`, which listens for HTTP. `authority` is the header Host.

    A connection that was idle for `keep_s` seconds is not used again. Opening one may take `connect_s` seconds.
    """

    def __init__(self, host: str, port: int, authority: str, keep_s: float, connect_s: float) -> None:
        self._host = host
        self._port = port
        self._keep_s = keep_s
        self._connect_s = connect_s
        self._head = f"Host: {authority}\r\nAccept: */*\r\nContent-Type: application/json\r\nContent-Length: "
        self._idle: deque[tuple[float, _Connection]] = deque()
        self._busy: set[_Connection] = set()
        self._closed = False

    async def post(self, path: str, body: bytes) -> HttpAnswer:
        """Post JSON. If the call is cancelled, its connection is closed.

        Raises OSError or TimeoutError: the server cannot be reached, ends the connection, or sends no HTTP.
        """
        loop = asyncio.get_running_loop()
        connection = self._take(loop.time()) or await self._open(loop)
        self._busy.add(connection)
        try:
            connection.send(f"POST {path} HTTP/1.1\r\n{self._head}{len(body)}\r\n\r\n".encode("latin-1"), body)
            answer = await connection.answer
        except BaseException:
            connection.close()
            raise
        finally:
            self._busy.discard(connection)
        if connection.is_open:
            self._idle.append((loop.time(), connection))
        return answer

    def close(self) -> None:
        """Close all connections. Calls that are in progress fail."""
        self._closed = True
        for connection in (*self._busy, *(idle for _, idle in self._idle)):
            connection.close()
        self._idle.clear()

    def _take(self, now: float) -> _Connection | None:
        """The connection that was used last; None if none is open. Closes connections that were idle too long."""
        while self._idle and self._idle[0][0] < now - self._keep_s:
            self._idle.popleft()[1].close()
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _open(self, loop: asyncio.AbstractEventLoop) -> _Connection:
        async with asyncio.timeout(self._connect_s):
            _, connection = await loop.create_connection(_Connection, self._host, self._port)
        if self._closed:
            connection.close()
            raise ConnectionAbortedError("the connections were closed")
        return connection


class _Connection(asyncio.Protocol):
    """One connection. It has one request at a time, and `answer` is the answer to the last request."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[HttpAnswer]
        self._waits = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @property
    def is_open(self) -> bool:
        """False as soon as an error or this side has closed the connection, which is before `connection_lost`."""
        return not self._transport.is_closing()

    def send(self, head: bytes, body: bytes) -> None:
        """Send a request. A later error ends `answer`. Raises ConnectionResetError: the connection is closed."""
        if not self.is_open:
            # A new connection may be closed before its first request. In Python 3.12, a write then raises TypeError.
            raise ConnectionResetError("the server closed the connection before a request was sent")
        self.answer = asyncio.get_running_loop().create_future()
        self._waits = True
        self._received = bytearray()
        self._reader: _Reader | None = None
        self._transport.writelines((head, body))

    def data_received(self, data: bytes) -> None:
        if not self._waits:
            self.close()  # The server sent more than was asked for.
            return
        self._received += data
        try:
            answer = self._read()
        except ValueError as error:
            self._fail(ConnectionError(f"the answer is not HTTP: {error}"))
            return
        if answer is not None:
            self._end(answer)

    def eof_received(self) -> None:
        """Close the connection, as the server did."""

    def connection_lost(self, error: Exception | None) -> None:
        if not self._waits:
            return
        if error is None and self._reader is not None and self._reader.until_end:
            self._end(HttpAnswer(self._reader.status, bytes(self._received)))
        else:
            self._fail(error or ConnectionResetError("the server closed the connection before it had answered"))

    def close(self) -> None:
        """Close the connection. A request in progress fails."""
        self._fail(ConnectionAbortedError("the connection was closed"))

    def _read(self) -> HttpAnswer | None:
        """The answer, or None if it is not complete. Raises ValueError: it is not HTTP."""
        while self._reader is None:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                if len(self._received) > MOST_HEAD_BYTES:
                    raise ValueError(f"its head has more than {MOST_HEAD_BYTES} bytes")
                return None
            head = bytes(self._received[: end + 4])
            del self._received[: end + 4]
            reader = _Reader(head)
            # An answer such as `100 Continue` comes before the real one.
            self._reader = reader if reader.status >= 200 else None
        body = self._reader.read(self._received)
        return None if body is None else HttpAnswer(self._reader.status, body)

    def _end(self, answer: HttpAnswer) -> None:
        self._waits = False
        if self._reader is None or not self._reader.keeps or self._received:
            self.close()
        if not self.answer.done():
            self.answer.set_result(answer)

    def _fail(self, error: Exception) -> None:
        self._transport.abort()
        if self._waits and not self.answer.done():
            self.answer.set_exception(error)
        self._waits = False


class _Reader:
    """Reads the body that follows `head`. Raises ValueError: it is not HTTP.

    - `keeps`: the server keeps the connection open after the answer
    - `until_end`: the body ends with the connection
    """

    def __init__(self, head: bytes) -> None:
        status = _STATUS.match(head)
        if status is None:
            raise ValueError(f"it begins with {head[:50]!r}")
        self.status = int(status[2])
        fields = head.lower()
        self._chunks: list[bytes] | None = [] if _CHUNKED.search(fields) else None
        length = _LENGTH.search(fields)
        self._length = 0 if self.status in (204, 304) else None if length is None else int(length[1])
        self.until_end = self._chunks is None and self._length is None
        self.keeps = (
            not self.until_end and not _CLOSES.search(fields) and (status[1] == b"1" or bool(_KEEPS.search(fields)))
        )

    def read(self, received: bytearray) -> bytes | None:
        """Take the body from the start of `received`; None if it is not complete. Raises ValueError: it is not HTTP."""
        if self._chunks is not None:
            return self._read_chunks(self._chunks, received)
        if self._length is None or len(received) < self._length:
            return None
        body = bytes(received[: self._length])
        del received[: self._length]
        return body

    @staticmethod
    def _read_chunks(chunks: list[bytes], received: bytearray) -> bytes | None:
        while (end := received.find(b"\r\n")) >= 0:
            size = _CHUNK.match(received[: end + 2])
            if size is None:
                raise ValueError(f"a chunk begins with {bytes(received[:50])!r}")
            count = int(size[1], 16)
            if not count:
                # The last chunk is followed by lines of further headers, and an empty line.
                trailer = received.find(b"\r\n\r\n", end)
                if trailer < 0:
                    return None
                del received[: trailer + 4]
                return b"".join(chunks)
            if len(received) < end + 2 + count + 2:
                return None
            chunks.append(bytes(received[end + 2 : end + 2 + count]))
            del received[: end + 2 + count + 2]
        return None
