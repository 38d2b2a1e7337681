"""A session with an MCP server: its handshake, its tools and its calls, each within a time limit.

A separate asyncio task holds the connection, because the package `mcp` must open and close a connection in one task,
and cancels this task when the connection breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from mcp import ClientSession, MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    UNSUPPORTED_PROTOCOL_VERSION,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    ListToolsRequest,
    ListToolsResult,
    PaginatedRequestParams,
    Tool,
)
from pydantic import BaseModel

from asyncrl.machine.finishing import finish
from asyncrl.text import reason_of
from asyncrl.tools.base import ToolRefusal
from asyncrl.tools.mcp.settings import McpServer
from asyncrl.tools.mcp.stdio import MAX_MESSAGE_BYTES, TOO_LARGE
from asyncrl.version import VERSION

CLOSE_S = 5.0
"""Seconds that a connection may take to close. After that, its task is cancelled. If the server is a program, the
cancellation kills the program at once."""

MAX_PAGES = 100
"""The maximum number of pages in a list of tools. All pages together may have MAX_MESSAGE_BYTES characters."""

CLOSED = (CONNECTION_CLOSED, "Connection closed")
"""The code and the text of the package `mcp`'s error for a closed connection. The text is compared, too, because
servers use the code for errors of their own."""

Result = TypeVar("Result", bound=BaseModel)


class SessionError(Exception):
    """The session is over: the server ended, broke the connection, or took too long."""


class AnswerError(Exception):
    """The server failed to answer a call; the session continues."""


class Link(Protocol):
    """A link to a server, by pipes or by HTTP."""

    @property
    def remark(self) -> str:
        """A remark on how the server ended, in a form that can be appended to an error's text."""
        ...

    @property
    def is_over(self) -> bool:
        """True if the server has ended, or has forgotten the session."""
        ...

    def open(self) -> AbstractAsyncContextManager[Any]:
        """Open the streams of one connection."""
        ...


class Session:
    """A session with `server` over `link`. `answered` counts its answered calls."""

    def __init__(self, link: Link, server: McpServer) -> None:
        self.answered = 0
        self._link = link
        self._server = server
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._holding = asyncio.create_task(self._hold())

    @classmethod
    async def open(cls, link: Link, server: McpServer) -> Session:
        """Open a session, with its handshake. Raises SessionError: it cannot be opened."""
        session = cls(link, server)
        both: set[asyncio.Future[Any]] = {session._holding, session._ready}
        try:
            done, _ = await asyncio.wait(both, timeout=server.start_s, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await finish(session.close())
            raise
        if session._ready in done:
            return session
        raise await session._over("" if done else f"it did not start within start_s={server.start_s:g}")

    @property
    def is_over(self) -> bool:
        return self._closing.is_set() or self._holding.done()

    async def tools(self) -> list[Tool]:
        """Request the list of all tools, page by page. Raises SessionError: the session is over; AnswerError: the
        server failed to answer, or the list is too long."""
        tools: list[Tool] = []
        cursor: str | None = None
        size = 0
        for _ in range(MAX_PAGES):
            request = ListToolsRequest(params=PaginatedRequestParams(cursor=cursor))
            page = await self._request(request, ListToolsResult, self._server.start_s)
            tools += page.tools
            size += sum(len(tool.model_dump_json()) for tool in page.tools)
            cursor = page.next_cursor
            if cursor is None:
                return tools
            if size > MAX_MESSAGE_BYTES:
                break
        raise AnswerError(f"its list of tools is too long; it has {len(tools)} tools so far")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Call a tool. Raises ToolRefusal: the server refused the call, and the policy may read why; SessionError: the
        session is over; AnswerError: the server failed."""
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=dict(arguments)))
        result = await self._request(request, CallToolResult, self._server.timeout_s)
        self.answered += 1
        return result

    async def close(self) -> None:
        """End the session, and the server if it is a program. Never raises."""
        self._closing.set()
        if self._ready.done():
            await asyncio.wait({self._holding}, timeout=CLOSE_S)
        self._holding.cancel()
        await asyncio.wait({self._holding}, timeout=CLOSE_S)
        self._ready.cancel()
        _forget_error(self._holding)

    async def _hold(self) -> None:
        who = Implementation(name="asyncrl", version=VERSION)
        async with self._link.open() as (read, write), ClientSession(read, write, client_info=who) as client:
            try:
                await client.initialize()
            except MCPError as error:
                if error.code != UNSUPPORTED_PROTOCOL_VERSION:
                    raise
                await client.discover()
            if not self._ready.done():
                self._ready.set_result(client)
            await self._closing.wait()

    async def _request(self, request: Any, kind: type[Result], limit_s: float) -> Result:
        if self.is_over:
            raise SessionError("the session is over")
        before = self.answered
        sending = asyncio.ensure_future(self._ready.result().send_request(request, kind))
        both: set[asyncio.Future[Any]] = {sending, self._holding}
        try:
            done, _ = await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.add_done_callback(_forget_error)
            sending.cancel()
        # A late answer does not end a shared session that answers other calls. At a URL, each call is a separate
        # request, so a new session would not help if the server hangs.
        if not done and self._server.shared and (self._server.url is not None or self.answered > before):
            raise AnswerError(f"it did not answer within {limit_s:g} s; the calls of other episodes continue")
        if not done:
            raise await self._over(f"it did not answer within {limit_s:g} s")
        if sending not in done:
            raise await self._over("")
        try:
            return sending.result()
        except MCPError as error:
            if TOO_LARGE in error.message:
                self.answered += 1
                raise ToolRefusal(f"Error: {TOO_LARGE}; ask for less.") from error
            if error.code == INVALID_PARAMS:
                self.answered += 1
                raise ToolRefusal(f"Error: {error.message}") from error
            if self._link.is_over or (error.code, error.message) == CLOSED:
                raise await self._over(error.message) from error
            raise AnswerError(f"it answered with the error {error.code}: {error.message:.500}") from error
        except ValueError as error:
            raise AnswerError(f"its result is not valid MCP: {reason_of(error):.500}") from error
        except Exception as error:
            raise await self._over(reason_of(error)) from error

    async def _over(self, reason: str) -> SessionError:
        """Close the session. Returns the error to raise, with the connection's own reason if there is one."""
        await finish(self.close())
        if self._holding.done() and not self._holding.cancelled() and (error := self._holding.exception()):
            reason = _first_reason(error)
        return SessionError(f"{reason or 'the connection ended'}{self._link.remark}")


def _forget_error(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task that is not awaited, so that asyncio does not log it."""
    if task.done() and not task.cancelled():
        task.exception()


def _first_reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return reason_of(error)
