"""Connects to an MCP server that is a program, over its standard input and output.

Unlike a connection of the package `mcp`, this one has bounds. A message that is too long is cut while it is read, and
its call gets an error. The connection ends after too many messages that answer no request.

The program leads a process group, which is killed when the connection closes or this process dies. The program's
environment has PATH, the given variables, and the variable by which a guard process (`machine/guard.py`) recognises the
program's children.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import (
    INTERNAL_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from asyncrl.machine.child import Guarded
from asyncrl.machine.program import start_program
from asyncrl.text import encodable

MAX_MESSAGE_BYTES = 8 << 20
TOO_LARGE = f"the result is larger than {MAX_MESSAGE_BYTES >> 20} MiB"
"""A part of the error of a call whose result is longer than MAX_MESSAGE_BYTES."""

UNREADABLE = "the result is not a message of MCP"
"""A part of the error of a call whose result cannot be read."""

MAX_STRAY = 10_000
"""The maximum number of lines, counted from the last request, that do not answer a request. Lines that are not messages
count, too."""

MAX_LINE_BYTES = 1 << 30
"""The maximum number of bytes in one line. A program that writes a longer line is ended."""

GRACE_S = 1.0
"""Seconds that a program may take to end after its input was closed, before it is killed."""

_REAPED_S = 2.0
_CHUNK = 1 << 16
_EDGE = 1 << 10
_STDERR_BYTES = 2000

_ID_FIRST = re.compile(rb'\A\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,18})\s*,')
_ID_LAST = re.compile(rb',\s*"id"\s*:\s*(\d{1,18})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*\Z')

FromServer = MemoryObjectReceiveStream[SessionMessage | Exception]
ToServer = MemoryObjectSendStream[SessionMessage]
Streams = tuple[FromServer, ToServer]


class Line(NamedTuple):
    """A line without its newline. If it is not `whole`, only its head and its tail are kept."""

    text: bytes
    whole: bool = True


class BoundedLines:
    """Divides chunks of bytes into lines, and never keeps more than `limit` bytes of a line."""

    def __init__(self, limit: int = MAX_MESSAGE_BYTES) -> None:
        self.length = 0
        """The length of the line that has not ended yet, in bytes."""
        self._limit = limit
        self._kept = bytearray()
        self._whole = True

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """Yield the lines that end within `chunk`."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._add(part)
            yield Line(bytes(self._kept), self._whole)
            self._kept.clear()
            self._whole = True
            self.length = 0
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self.length += len(part)
        self._kept += part
        if len(self._kept) > self._limit or not self._whole:
            self._whole = False
            del self._kept[_EDGE:-_EDGE]


class ProgramLink:
    """One process of the program `command`, and the pipes to it."""

    def __init__(self, command: tuple[str, ...], env: Mapping[str, str], cwd: str | None) -> None:
        self._command = command
        self._env = {"PATH": os.environ.get("PATH", os.defpath), **env}
        self._cwd = cwd
        self._stray = 0
        self._unanswered = set[str]()
        self._stderr = b""
        self._ended = ""

    @property
    def remark(self) -> str:
        """The way in which the program ended, if known, and the end of its standard error."""
        written = self._stderr.decode(errors="replace").strip()
        return self._ended + (f"; its standard error ends with: {written}" if written else "")

    @property
    def is_over(self) -> bool:
        return bool(self._ended)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Streams]:
        """Start the program. Yields the streams of messages from and to it. Raises OSError if it cannot start."""
        async with self._running() as process, anyio.create_task_group() as tasks:
            to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
            to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
            tasks.start_soon(self._read, process, to_session)
            tasks.start_soon(self._write, process, from_session, to_session)
            tasks.start_soon(self._read_errors, process)
            try:
                yield from_server, to_server
            finally:
                for stream in (from_server, to_server):
                    stream.close()
                tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[Process]:
        with Guarded(self._command) as guard:
            transport, protocol = await start_program(
                guard.command, _CHUNK, env=self._env, cwd=self._cwd, pass_fds=guard.files
            )
            process = Process(transport, protocol, asyncio.get_running_loop())
            try:
                yield process
            finally:
                try:
                    await self._end_gently(process, protocol.exited)
                finally:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
                    guard.close()
                    try:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(_REAPED_S):
                                await protocol.exited.wait()
                    finally:
                        # A process that has left the program's group may keep its ends of the pipes open.
                        transport.close()

    async def _end_gently(self, process: Process, exited: asyncio.Event) -> None:
        """Close the program's input and wait a while for its end."""
        if process.stdin is not None:
            process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await exited.wait()
        if self._ended and process.returncode is not None:
            self._ended += f" with status {process.returncode}"

    async def _read(self, process: Process, to_session: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Pass messages on until the program ends or writes too much."""
        assert process.stdout is not None
        lines = BoundedLines()
        with to_session, suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while chunk := await process.stdout.read(_CHUNK):
                for line in lines.feed(chunk):
                    message = _message(line)
                    self._stray += not self._answers(message)
                    if self._stray > MAX_STRAY:
                        self._ended = f"; it wrote {MAX_STRAY} lines that answer no request, and was ended"
                        return
                    if message is not None:
                        await to_session.send(message)
                if lines.length > MAX_LINE_BYTES:
                    self._ended = f"; it wrote a line of more than {MAX_LINE_BYTES >> 20} MiB, and was ended"
                    return
            self._ended = "; the program ended"

    def _answers(self, message: SessionMessage | None) -> bool:
        """True if the message is the first answer to a request."""
        if message is None or not isinstance(message.message, JSONRPCResponse | JSONRPCError):
            return False
        # Ids are compared as text, because a server may repeat the number of a request as text.
        id = str(message.message.id)
        is_first = id in self._unanswered
        self._unanswered.discard(id)
        return is_first

    async def _write(
        self,
        process: Process,
        from_session: MemoryObjectReceiveStream[SessionMessage],
        to_session: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        assert process.stdin is not None
        with from_session:
            async for each in from_session:
                if isinstance(each.message, JSONRPCRequest):
                    self._stray = 0
                    self._unanswered.add(str(each.message.id))
                text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode(errors="replace") + b"\n")
                try:
                    await process.stdin.drain()
                except ConnectionError:
                    self._ended = self._ended or "; the program ended"
                    to_session.close()
                    return

    async def _read_errors(self, process: Process) -> None:
        assert process.stderr is not None
        while chunk := await process.stderr.read(_CHUNK):
            self._stderr = (self._stderr + chunk)[-_STDERR_BYTES:]


def _message(line: Line) -> SessionMessage | None:
    """Read the message in a line, or an error in place of a message that is too long or unreadable.

    None if the line has no message, or does not show which request it answers.
    """
    if not line.whole:
        return _unread(line, TOO_LARGE)
    if not line.text.strip():
        return None
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line.text, by_name=False))
    except ValueError:
        return _repaired(line)


def _repaired(line: Line) -> SessionMessage | None:
    """Read a message with invalid UTF-8, for instance because the server cut a character in half."""
    try:
        value = encodable(json.loads(line.text.decode(errors="replace")))
        return SessionMessage(jsonrpc_message_adapter.validate_python(value, by_name=False))
    except (ValueError, RecursionError):
        return _unread(line, UNREADABLE)


def _unread(line: Line, reason: str) -> SessionMessage | None:
    found = _ID_FIRST.search(line.text) or _ID_LAST.search(line.text)
    if found is None:
        return None
    error = ErrorData(code=INTERNAL_ERROR, message=reason)
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(found[1]), error=error))
