"""Runs users' code in separate processes, which are killed when the code overruns its limits.

Such code may run forever, block the interpreter in a regular expression, use up the memory, or crash. None of that may
stop the scorer or become a reward.

If a request takes too long, the process that runs it writes its stacks and ends itself (`judge_program.py`). If it does
not, the scorer kills it. A process that crashes writes its stacks, too, and one that calls `os._exit` writes the user's
part of its stack. The scorer logs the stacks, and its error names the line of the user's code.

Each request has a random number, which its answer must have, too. Code can write answers of its own into the pipe. So
an answer that is still in the pipe after a request must not count as the answer to the next one.

The scorer also measures the memory of the process. A memory limit set inside the process would raise a MemoryError in
the code, and the code might treat this error as a wrong answer.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from typing import Any, TypeVar

import psutil

from asyncrl import wire
from asyncrl.errors import ConfigError, ScoringError, WireError
from asyncrl.machine.child import Guarded
from asyncrl.scoring.pipe import TimedPipe
from asyncrl.text import line_in_stacks
from asyncrl.wire import Message

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_TIMEOUT_S = 120.0
"""The maximum seconds that a process may take to start and to import its modules."""

GRACE_S = 2.0
"""The time in seconds between a request's time limit and the moment at which the scorer kills a process that has not
ended itself."""

MARK = "ASYNCRL_JUDGE"
"""An environment variable that each process of a pool has. If code in such a process opens a pool itself, the pool is
refused because of this variable. Otherwise processes would start further processes without end."""

_MOST_STACKS = 1 << 18
"""The maximum number of bytes that are read from the file of stacks."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one request.

    - `judge`: what error messages call the code, for example "the rule"
    - `timeout_s`: the limit in seconds; `timeout_key`: its configuration key
    - `memory_mb`: how far the memory of the process and its descendants may grow beyond its size before the first
      request; None: without limit
    - `start_timeout_s`: the limit for the start of a process
    - `stacks_level`: the level at which the stacks of a process that overran a limit are logged
    """

    judge: str
    timeout_s: float
    timeout_key: str
    memory_mb: int | None
    start_timeout_s: float = START_TIMEOUT_S
    stacks_level: int = logging.WARNING


class EndedError(ScoringError):
    """The process of a request ended before it answered.

    - `overran`: true if the request took too long
    - `line`: the line of the user's code that ran then; empty if it is unknown
    """

    def __init__(self, reason: str, overran: bool, line: str) -> None:
        super().__init__(reason)
        self.overran = overran
        self.line = line


class SlowStartError(ConfigError):
    """A process took too long to start."""


class JudgePool:
    """Up to `processes` processes, each of which runs the module `program`. The module must call
    `judge_program.serve`, which receives `settings`.

    The first process starts at once, to report code that cannot be loaded. The other processes start when they are
    needed. With `starts_later`, the first process also starts only when it is needed, in the background. The processes
    inherit the descriptors `files`. `refused` counts the answers whose number was not that of the request.

    Raises ConfigError: the first process refuses its settings or does not start, or this process itself belongs to a
    pool.
    """

    def __init__(
        self,
        program: str,
        settings: Mapping[str, Any],
        processes: int,
        limits: Limits,
        starts_later: bool = False,
        files: Sequence[int] = (),
    ) -> None:
        if MARK in os.environ:
            raise ConfigError(
                f"the module that has {limits.judge} scores episodes as soon as it is imported: move the code that "
                'does so into a block that begins with if __name__ == "__main__":'
            )
        self._program = program
        self._settings = {**settings, "judge": limits.judge}
        self._limits = limits
        self._files = files
        self.refused = 0
        self._lock = threading.Lock()
        self._running: set[_JudgeProcess] = set()
        self._closed = False
        self._threads = ThreadPoolExecutor(processes, limits.judge.replace(" ", "-"))
        self._idle = [] if starts_later else [self._start()]

    def submit(self, messages: Sequence[Message], read: Callable[[Message], T]) -> Future[T]:
        """Send a request in the background. The future gets what `read` makes of the answer.

        The future raises ScoringError if the code failed or overran a limit, and EndedError if its process ended. It
        raises ConfigError if a process does not start, and CancelledError if the pool is closed first. Raises
        ScoringError: the pool is closed.
        """
        try:
            return self._threads.submit(lambda: self._read(read, self._ask(messages)))
        except RuntimeError as error:
            raise self._closed_error() from error

    def _closed_error(self) -> ScoringError:
        return ScoringError(f"the process that runs {self._limits.judge} was closed")

    def _read(self, read: Callable[[Message], T], reply: Message) -> T:
        try:
            return read(reply)
        except WireError as error:
            raise _unreadable(self._limits.judge, error) from error

    def _ask(self, messages: Sequence[Message]) -> Message:
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._start()
        try:
            reply = self._request(process, messages)
        except Exception:
            self._end(process)
            raise
        self._idle.append(process)
        if reply.kind == "failed":
            raise ScoringError(str(reply.body["reason"]))
        return reply

    def close(self) -> None:
        """Ends the processes, even busy ones."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in list(self._running):
            self._end(process)

    def _request(self, process: _JudgeProcess, messages: Sequence[Message]) -> Message:
        limits, started = self._limits, time.monotonic()
        try:
            number = process.send(messages, limits)
            until = time.monotonic() + limits.timeout_s + GRACE_S
            while (reply := process.receive(until, limits)).sequence != number:
                self._refuse()
            return reply
        except (EOFError, OSError) as error:
            overran = time.monotonic() - started >= limits.timeout_s
            process.kill()
            line = process.last_line(limits)
            reason = (
                f"{limits.judge} took longer than {limits.timeout_key}={limits.timeout_s:g}"
                if overran
                else f"{limits.judge} ended its process{process.end}"
            )
            raise EndedError(f"{reason} ({line})" if line else reason, overran, line) from error

    def _refuse(self) -> None:
        with self._lock:
            self.refused += 1
            count = self.refused
        if count & (count - 1) == 0:  # Warns of the 1st, 2nd, 4th, 8th and so on: code may write them without end.
            logger.warning(
                "the process that runs %s sent an answer to another request than its present one, which was refused "
                "(%d so far): does the code write into the process's pipe?",
                *(self._limits.judge, count),
            )

    def _start(self) -> _JudgeProcess:
        with self._lock:
            if self._closed:
                raise self._closed_error()
            process = _JudgeProcess(self._program, self._files)
            self._running.add(process)
        try:
            self._await_start(process)
        except Exception:
            self._end(process)
            raise
        return process

    def _await_start(self, process: _JudgeProcess) -> None:
        try:
            reply = process.start(self._settings, self._limits)
        except (EOFError, OSError, ScoringError) as error:
            starting = f"the process that runs {self._limits.judge} did not start"
            if isinstance(error, TimeoutError):
                raise SlowStartError(f"{starting} within {self._limits.start_timeout_s:g} s") from error
            why = error if isinstance(error, ScoringError) else "its output says why"
            raise ConfigError(f"{starting}; {why}") from error
        if reply.kind == "failed":
            raise ConfigError(str(reply.body["reason"]))

    def _end(self, process: _JudgeProcess) -> None:
        with self._lock:
            self._running.discard(process)
        process.kill()
        process.close()


class _JudgeProcess:
    """A process that runs `judge_program.serve`, and the pipe to it, which carries messages in the wire format.

    The process leads its own session, so that all processes that its code has started are killed with it. A guard kills
    them if the process that started this one ends.
    """

    def __init__(self, program: str, inherited: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self._pipe = TimedPipe(ours, self._look)
        self._held = ExitStack()
        self._stacks, name = mkstemp(prefix="asyncrl-stacks-")
        self._held.callback(os.close, self._stacks)
        Path(name).unlink()
        files = [theirs.fileno(), self._stacks]
        # The new process looks for modules where this process does.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), MARK: "1"}
        guard = self._held.enter_context(Guarded([sys.executable, "-m", program, *map(str, files)]))
        self._process = subprocess.Popen(
            guard.command, pass_fds=[*files, *inherited, *guard.files], env=environment, start_new_session=True
        )
        self._memory_before = 0
        self._limits: Limits | None = None
        theirs.close()

    def start(self, settings: Mapping[str, Any], limits: Limits) -> Message:
        """The first message of the process, to which this method first sends the settings. Raises: see `receive`."""
        # The settings are not in the command line: a rule's parameters may contain API keys, and every user of the
        # machine can read command lines.
        self._pipe.send(json.dumps(settings).encode(), time.monotonic() + limits.start_timeout_s)
        return self._received(limits.judge, time.monotonic() + limits.start_timeout_s)

    def send(self, messages: Sequence[Message], limits: Limits) -> int:
        """Send a request, and return its number, which code of an earlier request cannot know.

        Raises TimeoutError: the process did not read the messages in time; EOFError or OSError: it has ended;
        WireError: a message cannot be encoded.
        """
        self._memory_before = self._memory_before or self._memory()
        encoded = [wire.join(wire.encode(each, wire.MAX_LARGE_HEADER_BYTES)) for each in messages]
        deadline = time.monotonic() + limits.timeout_s + GRACE_S
        number = 1 + secrets.randbelow(1 << 62)
        for each in (f"{len(encoded)} {number}".encode(), *encoded):
            self._pipe.send(each, deadline)
        return number

    def receive(self, deadline: float, limits: Limits) -> Message:
        """The next message.

        Raises TimeoutError: the whole message did not come before the `deadline`; EOFError or OSError: the process has
        ended; ScoringError: the message cannot be read, or since the first request, the memory of the process and its
        descendants has grown by more than `limits` allow.
        """
        self._limits = limits
        try:
            return self._received(limits.judge, deadline)
        finally:
            self._limits = None

    def _received(self, judge: str, deadline: float) -> Message:
        try:
            return wire.decode(wire.split(self._pipe.receive(deadline)))
        except WireError as error:
            raise _unreadable(judge, error) from error

    def _look(self) -> bool:
        """True if the process has ended. If a request is answered before the first look, its memory is never measured.
        Raises ScoringError: see `receive`."""
        if self._process.poll() is not None:
            return True
        most = None if self._limits is None else self._limits.memory_mb
        if self._limits is not None and most is not None and self._memory() - self._memory_before > most << 20:
            raise ScoringError(f"{self._limits.judge} took more than scoring.rule_memory_mb={most}")
        return False

    def kill(self) -> None:
        """Ends the process and all its descendants."""
        for process in self._tree():
            with suppress(psutil.Error):
                process.kill()
        # `wait` has not returned yet, so no other process can have got this id: `killpg` kills only what it should.
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_line(self, limits: Limits) -> str:
        """The line of the user's code that ran when the process ended; empty if it is unknown. Logs the stacks that the
        process wrote."""
        stacks = os.pread(self._stacks, _MOST_STACKS, 0).decode(errors="replace")
        if stacks:
            message = "the stacks of the process that ran %s:\n%s"
            logger.log(limits.stacks_level, message, limits.judge, stacks.rstrip())
        return line_in_stacks(stacks)

    @property
    def end(self) -> str:
        """The way in which the process had ended before `kill` was called, as the end of a sentence; empty if it is
        unknown."""
        status = self._process.returncode
        if status >= 0:
            return f" with status {status}"
        # The process also kills itself by SIGKILL, after an error that its log has.
        return "" if status == -signal.SIGKILL else f" by {signal.Signals(-status).name}"

    def close(self) -> None:
        self._held.close()
        self._pipe.close()

    def _memory(self) -> int:
        return sum(map(_resident, self._tree()))

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []


def _unreadable(judge: str, error: WireError) -> ScoringError:
    return ScoringError(f"the process that runs {judge} sent an answer that cannot be read: {error}")


def _resident(process: psutil.Process) -> int:
    """The bytes of memory that a process uses.

    On Linux, memory that several processes share is divided among them.
    """
    with suppress(psutil.NoSuchProcess):
        try:
            memory = process.memory_full_info()
        except psutil.AccessDenied:
            return int(process.memory_info().rss)
        return int(getattr(memory, "pss", memory.uss))
    return 0
