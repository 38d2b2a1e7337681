"""Connects to an MCP server at a URL (streamable HTTP), with bounds on the bytes of responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from asyncrl.tools.mcp.stdio import MAX_MESSAGE_BYTES, TOO_LARGE

_CONNECT_S = 30.0


class TooLargeError(httpx2.SSEError, httpx2.StreamError):
    """A response is too large. The package `mcp` returns the text of this error as the answer to the call."""


class UrlLink:
    """One connection to the server at `url`. Each request has the `headers`."""

    remark = ""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.is_over = False
        self._url = url
        self._headers = headers

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        """Open the streams of messages from and to the server. Nothing is sent yet."""
        # There is no time limit for reading, because the session limits how long an answer may take.
        timeout = httpx2.Timeout(_CONNECT_S, read=None)
        async with (
            httpx2.AsyncClient(
                transport=_BoundedTransport(self._forgotten), headers=self._headers, timeout=timeout, trust_env=False
            ) as client,
            # The limit here is twice as high, so that the transport refuses a large response before the package `mcp`
            # does.
            streamable_http_client(self._url, http_client=client, max_sse_event_size=2 * MAX_MESSAGE_BYTES) as streams,
        ):
            yield streams

    def _forgotten(self) -> None:
        self.is_over = True


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Refuses responses that are compressed or too large. It never opens the stream on which a server could send
    messages that answer no request."""

    # A compressed response could unpack to any size. If the stream for other messages were opened, a server could make
    # the client reopen it again and again.

    def __init__(self, forgotten: Callable[[], None]) -> None:
        """`forgotten` is called when the server reports that it does not know the session."""
        super().__init__()
        self._forgotten = forgotten

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET" and "last-event-id" not in request.headers:
            return httpx2.Response(httpx2.codes.METHOD_NOT_ALLOWED, request=request)
        request.headers["accept-encoding"] = "identity"
        response = await super().handle_async_request(request)
        if response.status_code == httpx2.codes.NOT_FOUND and "mcp-session-id" in request.headers:
            self._forgotten()
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.DecodingError("the server compressed its response, though the request forbids it")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream
        self._left = MAX_MESSAGE_BYTES

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._left -= len(chunk)
            if self._left < 0:
                raise TooLargeError(TOO_LARGE)
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
