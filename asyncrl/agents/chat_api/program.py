"""Agents that are programs, which may use another Python, other packages or another language.

A program reads one line of JSON for each episode, `{"task": ..., "base_url": ..., "api_key": ...}`. It answers with one
JSON object in a line, which may have `rewards`, `metrics` and `turns`, or `error`. Lines without a JSON object are
ignored. If an answer repeats the `api_key`, it counts only for the episode with this key.

If a program ends, hangs or prints without end, only its own episode fails. Each program leads a process group, which is
killed when the program's work is over or the actor ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.agents.chat_api.result import AgentError, AgentResult, error_in, read_result, task_body
from asyncrl.agents.chat_api.waiting import WaitingAgent
from asyncrl.errors import ConfigError
from asyncrl.machine.child import Guarded
from asyncrl.machine.finishing import finish
from asyncrl.machine.program import ProgramProtocol, start_program
from asyncrl.network.throttle import ErrorLogger
from asyncrl.types import Task

log = logging.getLogger(__name__)

INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "USER")
"""The environment variables of the actor that programs inherit. The others are left out, because they may contain
keys."""

CHUNK = 1 << 16

MAX_LINE = 1 << 20
"""The maximum number of bytes in the line of an answer."""

LAST_STDERR = 4096
"""The number of bytes kept from the end of a program's standard error."""

SHOWN = 200
"""The number of bytes of an unreadable line that a message shows."""

_BOM = b"\xef\xbb\xbf"

READING_S = 1.0
"""The maximum seconds for which the actor still reads the output of a program that has ended. The output may stay open
longer, because processes that left the program's group may hold it open."""

ENDING_S = 5.0
"""Seconds in which a program that plays only one episode must end after its answer."""


@dataclass(slots=True)
class ProgramCounts:
    """Counts since the actor started.

    - `started`: programs that were started
    - `failed`: episodes that failed because of their program
    """

    started: int = 0
    failed: int = 0


class AgentPrograms(WaitingAgent):
    """Plays episodes with programs that run `command`, with `environment` added to the inherited variables.

    If `processes` is None, each episode has its own program. Otherwise there are `processes` programs, each of which
    plays one episode after another, and episodes wait for a free program. Raises ConfigError: the program of `command`
    does not exist.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], processes: int | None = None) -> None:
        check_command(command)
        self.counts = ProgramCounts()
        self._command = command
        self._environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
        # Without PYTHONUNBUFFERED, the answers of a Python program would wait in its output buffer.
        self._environment |= {"PYTHONUNBUFFERED": "1", **environment}
        self._error_logger = ErrorLogger(log)
        self._stays = processes is not None
        self._idle: asyncio.Queue[AgentProgram | None] = asyncio.Queue()
        for _ in range(processes or 0):
            self._idle.put_nowait(None)

    def counters(self) -> Mapping[str, float]:
        """Counts since the actor started."""
        return {f"agent_programs_{name}": count for name, count in asdict(self.counts).items()}

    async def close(self) -> None:
        """End the idle programs. A program that plays an episode ends when this episode is cancelled."""
        while not self._idle.empty():
            if program := self._idle.get_nowait():
                await program.end()

    async def wait_and_play(self, task: Task, base_url: str, api_key: str, begin: Callable[[], None]) -> AgentResult:
        """Let a program play one episode. Raises AgentError: the program reported an error, or gave no valid answer."""
        request = {"task": task_body(task), "base_url": base_url, "api_key": api_key}
        program = await self._idle.get() if self._stays else None
        begin()
        kept = False
        try:
            if program is None or not program.is_usable:
                program = await self._start(program)
            answer = await program.play(request, last=not self._stays)
            kept = self._stays
        except ProgramError as error:
            self.counts.failed += 1
            self._error_logger.exception(f"{error}; its standard error ends with:\n{error.stderr}", error)
            raise
        finally:
            try:
                if program is not None and not kept:
                    await finish(program.end())
            finally:
                if self._stays:
                    self._idle.put_nowait(program if kept else None)
        if (reason := error_in(answer)) is not None:
            raise AgentError(f"the agent's program reports: {reason}")
        return read_result({name: value for name, value in answer.items() if name not in ("error", "api_key")})

    async def _start(self, before: AgentProgram | None) -> AgentProgram:
        if before is not None:
            await finish(before.end())
        self.counts.started += 1
        return await AgentProgram.start(self._command, self._environment)


class ProgramError(AgentError):
    """A program ended without a valid answer. `stderr` is the end of its standard error."""

    def __init__(self, reason: str, stderr: str) -> None:
        super().__init__(f"{reason}: {stderr.splitlines()[-1][:300]}" if stderr.strip() else reason)
        self.stderr = stderr


class AgentProgram:
    """A running program. Its owner must always call `end`."""

    def __init__(
        self, transport: asyncio.SubprocessTransport, protocol: ProgramProtocol, guard: Guarded, given: int
    ) -> None:
        self._transport = transport
        self._guard = guard
        self._process = Process(transport, protocol, asyncio.get_running_loop())
        self._given = given
        self._stderr_parts: deque[bytes] = deque()
        self._answer: asyncio.Future[dict[str, object]] | None = None
        self._key: object = None
        self._unrequested = False
        self._unread = b""
        self._line = bytearray()
        self._readers = [asyncio.ensure_future(self._read_answers()), asyncio.ensure_future(self._read_stderr())]
        self._ended = asyncio.ensure_future(self._end_of(protocol))

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> AgentProgram:
        """Start a program. Raises OSError: the system cannot start another process."""
        read, write = os.pipe()
        guard = Guarded(command)
        try:
            transport, protocol = await start_program(
                guard.command, CHUNK, stdin=read, env=dict(environment), pass_fds=guard.files
            )
        except BaseException:
            os.close(write)
            guard.close()
            raise
        finally:
            os.close(read)
        os.set_blocking(write, False)
        return cls(transport, protocol, guard, write)

    @property
    def is_usable(self) -> bool:
        """True if the program still runs, and has printed no line that could be mistaken for the answer to the next
        request."""
        return not self._ended.done() and not self._unrequested and not self._line

    async def play(self, request: Mapping[str, object], last: bool) -> dict[str, object]:
        """Send a request and wait for its answer.

        `last` says that no request follows. In this case, the program may end with status 0 and without a line that
        looks like an answer. The result is then {}. Raises ProgramError: the program ended in another way.
        """
        answer: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._answer, self._key, self._unread = answer, request["api_key"], b""
        sending = asyncio.ensure_future(self._send(json.dumps(request).encode() + b"\n", last))
        try:
            first: list[asyncio.Future[Any]] = [answer, self._ended]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                # The program's last output may still be in the pipe. Once the process group is killed, none of its
                # processes writes more.
                self._stop()
                first = [answer, self._readers[0]]
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED, timeout=READING_S)
                self._read(bytes(self._line))  # The last line may lack a newline.
            if answer.done():
                if last:
                    await asyncio.wait([self._ended], timeout=ENDING_S)
                return answer.result()
            status = self._ended.result()
            if last and status == 0 and not self._unread:
                return {}
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            what = f", but with a line that cannot be read as one: {self._unread!r:.200}" if self._unread else ""
            await asyncio.wait([self._readers[1]], timeout=READING_S)
            raise ProgramError(f"the agent's program ended {how} without an answer{what}", self._stderr())
        finally:
            sending.cancel()
            self._answer = None

    async def end(self) -> None:
        """Kill the program's process group, and wait until the program has ended."""
        self._stop()
        self._close_given()
        await self._ended
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._transport.close()

    async def _end_of(self, protocol: ProgramProtocol) -> int:
        await protocol.exited.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    def _stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._guard.close()

    def _close_given(self) -> None:
        if self._given >= 0:
            os.close(self._given)
            self._given = -1

    async def _send(self, line: bytes, last: bool) -> None:
        """Write a line in pieces. If the pipe is full, wait until the program has read from it."""
        # A program that does not read must not block the event loop.
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._given, rest) :]
            except BlockingIOError:
                await self._room()
            except BrokenPipeError:
                return
        if last:
            self._close_given()

    async def _room(self) -> None:
        """Wait until the program's input has room, because the program has read something."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_writer(self._given, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._given)

    async def _read_answers(self) -> None:
        """Read the program's output. A line that is a JSON object becomes the answer to the present request."""
        assert self._process.stdout is not None
        too_long = False
        while chunk := await self._process.stdout.read(CHUNK):
            *ended, rest = chunk.split(b"\n")
            for each in ended:
                self._line += each
                if not too_long:
                    self._read(bytes(self._line))
                self._line.clear()
                too_long = False
            if len(self._line) + len(rest) > MAX_LINE:
                self._note_unread(bytes(self._line + rest[:SHOWN]))
                self._line.clear()
                too_long = True
            elif not too_long:
                self._line += rest

    def _read(self, line: bytes) -> None:
        answer = _object(line)
        if answer is None:
            self._note_unread(line)
        elif self._answer is None or self._answer.done():
            self._unrequested = True  # The next episode must not get this answer.
        elif answer.get("api_key", self._key) == self._key:
            self._answer.set_result(answer)

    def _note_unread(self, line: bytes) -> None:
        """Keep an unreadable line that looks like an answer. If the program ends without an answer, the error shows
        this line."""
        if line.removeprefix(_BOM).lstrip().startswith(b"{"):
            self._unread = self._unread or line[:SHOWN]

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        kept = 0
        while chunk := await self._process.stderr.read(LAST_STDERR):
            self._stderr_parts.append(chunk)
            kept += len(chunk)
            while kept - len(self._stderr_parts[0]) >= LAST_STDERR:
                kept -= len(self._stderr_parts.popleft())

    def _stderr(self) -> str:
        text = b"".join(self._stderr_parts)[-LAST_STDERR:].decode(errors="replace")
        return "".join(letter for letter in text if letter.isprintable() or letter == "\n")


def check_command(command: Sequence[str]) -> None:
    """Raises ConfigError: the program of `command` does not exist."""
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"actor.agent_command: there is no program {command[0]}; give its path, or the name of one on the PATH"
        )


def _object(line: bytes) -> dict[str, object] | None:
    """Read a line as a JSON object. None if it is not one."""
    line = line.removeprefix(_BOM)
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
