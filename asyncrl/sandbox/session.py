"""Python sessions in the sandbox: an interpreter that runs cells one after another, and keeps their variables.

A session has the same isolation and limits as a program (`sandbox.py`), but its time limit holds for each cell. Between
two cells all its processes are stopped. If one of them nevertheless runs, the session ends. When the caller ends, for
any reason, the session and all its processes end too.

Starting Python for each episode would take too long. So `SessionServer` starts one Python process, which forks for each
session. The sessions share the memory that they do not change.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from enum import Enum, auto
from typing import IO

from asyncrl.sandbox.child.cells import reply_to
from asyncrl.sandbox.child.options import FOLDER_PREFIX
from asyncrl.sandbox.child.watching import GO, STOP
from asyncrl.sandbox.sandbox import (
    MAX_OUTPUT_BYTES,
    ProgramResult,
    SandboxError,
    SandboxLimits,
    child_arguments,
    child_command,
    child_environment,
    result_of,
    why_no_namespaces,
)

_START_S = 60.0
_BROKEN = 1
"""The status that is reported for a session that broke the protocol, or exited with status 0. It cannot be 0, because 0
means that the session continues."""


class _Outcome(Enum):
    DONE, LATE, ENDED, BROKEN = auto(), auto(), auto(), auto()


class Interpreter:
    """One interpreter, which runs one cell at a time.

    `stack` closes its resources. `namespaces` is true if it runs in new namespaces.
    """

    def __init__(
        self, control: socket.socket, cells: socket.socket, output: IO[bytes], stack: ExitStack, namespaces: bool
    ) -> None:
        self._control = control
        self._cells = cells
        self._output = output
        self._stack = stack
        self._namespaces = namespaces
        self._done = 0
        self._report = asyncio.ensure_future(self._read_report())
        self._closing: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._closing is None and not self._report.done()

    async def begin(self) -> None:
        """Wait until the interpreter can run cells. Raises SandboxError."""
        try:
            outcome = await self._outcome(b"", 0, _START_S)
        except BaseException:
            await self.close()
            raise
        if outcome is not _Outcome.DONE:
            await self.close()
            report = self._report.result()
            raise SandboxError(f"a session did not start: {report.removeprefix('failed ') or outcome.name.lower()}")
        self._order(STOP)

    async def run(self, code: str, wall_s: float) -> ProgramResult:
        """Run a cell. The output includes the value of its last expression.

        The status is 0 if the session continues. Otherwise the session has ended, and the status is that of its
        process, as for a program. Raises SandboxError: a fault of this machine ended the session.
        """
        request = json.dumps({"code": code}).encode() + b"\n"
        self._order(GO)
        try:
            outcome = await self._outcome(request, self._done + 1, wall_s)
        except BaseException:
            await self.close()
            raise
        if outcome is _Outcome.DONE:
            self._done += 1
            self._order(STOP)
            return ProgramResult(await asyncio.to_thread(self._printed), 0)
        await self._end()
        printed = await asyncio.to_thread(self._printed)
        await self.close()
        if outcome is _Outcome.ENDED:
            ran = result_of(printed, self._report.result(), self._namespaces)
            return replace(ran, status=ran.status or _BROKEN)
        return ProgramResult(printed, None if outcome is _Outcome.LATE else _BROKEN)

    async def close(self) -> None:
        """End the interpreter with all its processes."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self._end()
        finally:
            await asyncio.to_thread(self._stack.close)

    async def _end(self) -> None:
        """End the processes, and wait until the watcher closes the connection. All processes have ended then."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        await asyncio.shield(self._report)

    async def _read_report(self) -> str:
        loop, report = asyncio.get_running_loop(), b""
        with suppress(OSError):
            while part := await loop.sock_recv(self._control, 8192):
                report += part
        return report.decode(errors="replace")

    async def _outcome(self, request: bytes, number: int, seconds: float) -> _Outcome:
        """Wait for the reply to request `number`, for the end of the session, or until `seconds` have passed."""
        reply = asyncio.ensure_future(self._exchange(request, reply_to(number)))
        try:
            await asyncio.wait({reply, self._report}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if reply.done():
                is_reply = reply.result()
                return _Outcome.DONE if is_reply else _Outcome.ENDED if self._report.done() else _Outcome.BROKEN
            return _Outcome.ENDED if self._report.done() else _Outcome.LATE
        finally:
            reply.cancel()

    async def _exchange(self, request: bytes, wanted: bytes) -> bool:
        """Send a request. Returns true if the program replies with exactly the bytes `wanted`."""
        loop, reply = asyncio.get_running_loop(), b""
        with suppress(OSError):
            await loop.sock_sendall(self._cells, request)
            while reply != wanted and wanted.startswith(reply):
                part = await loop.sock_recv(self._cells, 1 << 10)
                if not part:
                    break
                reply += part
            else:
                return reply == wanted
        # Either the session is ending, or the program has closed the connection and runs until its time is over.
        await asyncio.shield(self._report)
        return False

    def _order(self, order: bytes) -> None:
        # Sending fails if the watcher has ended.
        with suppress(OSError):
            self._control.send(order)

    def _printed(self) -> str:
        """Read and clear the output."""
        # `os.pread` is used because the buffer of the file object would miss what the program writes.
        printed = os.pread(self._output.fileno(), MAX_OUTPUT_BYTES, 0)
        os.ftruncate(self._output.fileno(), 0)
        return printed.decode(errors="replace")


class SessionServer:
    """Starts sessions as forks of one process. This process is started for the first session, and again if it has
    ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    async def start(self, limits: SandboxLimits, namespaces: bool | None = None) -> Interpreter:
        """Start a session. The time limits in `limits` do not apply. See `sandbox.run` for `namespaces`.

        Raises SandboxError.
        """
        if namespaces is None:
            namespaces = not await asyncio.to_thread(why_no_namespaces)
        with ExitStack() as stack:
            output = stack.enter_context(tempfile.TemporaryFile())
            # With O_APPEND, processes write at the right position after `_printed` has truncated the file.
            fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
            folder = "/tmp"
            if not namespaces:
                made = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True)
                folder = stack.enter_context(made)
            (control, for_watcher), (cells, for_program) = socket.socketpair(), socket.socketpair()
            for each in (control, cells):
                stack.enter_context(each).setblocking(False)
            request = {
                "arguments": child_arguments(replace(limits, cpu_s=math.inf), namespaces),
                "folder": folder,
            }
            fds = for_watcher.detach(), for_program.detach(), os.dup(output.fileno())
            await asyncio.to_thread(self._send, json.dumps(request).encode(), fds)
            session = Interpreter(control, cells, output, stack.pop_all(), namespaces)
        await session.begin()
        return session

    def close(self) -> None:
        """End the process that forks. Open sessions continue."""
        with self._lock:
            self._stop()

    def _send(self, request: bytes, fds: Sequence[int]) -> None:
        """Ask the forking process for a session that has the files `fds`. Then close this process's copies of the
        files."""
        try:
            with self._lock:
                try:
                    self._send_once(request, fds)
                except OSError:
                    # The forking process may have been killed: by the kernel, because memory was short, or by a program
                    # of the same user.
                    self._stop()
                    self._send_once(request, fds)
        except OSError as error:
            raise SandboxError(f"the process that starts sessions has ended: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)

    def _send_once(self, request: bytes, fds: Sequence[int]) -> None:
        if self._socket is None:
            self._socket = self._launch()
        socket.send_fds(self._socket, [request], fds)

    def _launch(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*child_command("server"), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=child_environment("/tmp"),
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        ours.settimeout(_START_S)
        return ours

    def _stop(self) -> None:
        process, connection, self._process, self._socket = self._process, self._socket, None, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()
