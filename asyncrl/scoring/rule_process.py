"""The parent's side of a `verifier_process`: its pipe, the memory that it takes, and its end.

The process leads a session of its own, so that what a rule has started and left behind is killed with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe

import psutil

from asyncrl.wire import MAX_LARGE_HEADER_BYTES, Message, decode, encode, join, split

_WATCH_S = 0.1
"""Between two looks at the memory. A rule that is done sooner is never looked at."""


class RuleMemoryError(Exception):
    """The process and those that it started take more memory than they may."""


class RuleProcess:
    """A running `verifier_process`, started with SETTINGS_AS_JSON. Messages pass a pipe in the wire format."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._pipe, theirs = Pipe()
        fd = theirs.fileno()
        # What can be imported here can be imported there.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "asyncrl.scoring.verifier_process", str(fd), *arguments]
        self._process = subprocess.Popen(command, pass_fds=[fd], env=environment, start_new_session=True)
        self._before = 0
        theirs.close()

    def send(self, message: Message) -> None:
        """Raises OSError: the process has ended; WireError: the message cannot be encoded."""
        self._before = self._before or self._memory()
        self._pipe.send_bytes(join(encode(message, MAX_LARGE_HEADER_BYTES)))

    def receive(self, timeout_s: float, memory: int | None = None) -> Message:
        """The next message, within `timeout_s` and the bytes of `memory` beyond what was taken before the first
        request. Raises TimeoutError, RuleMemoryError, and EOFError or OSError: the process has ended."""
        deadline = time.monotonic() + timeout_s
        while not self._pipe.poll(max(0.0, min(_WATCH_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TimeoutError
            if memory is not None and self._memory() - self._before > memory:
                raise RuleMemoryError
        return decode(split(self._pipe.recv_bytes()))

    def kill(self) -> None:
        """End the process and all that it started."""
        for process in self._tree():
            with suppress(psutil.Error):
                process.kill()
        # Until it is waited for, the id stays its own, even after its end.
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._pipe.close()

    def _memory(self) -> int:
        return sum(map(_resident, self._tree()))

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []


def _resident(process: psutil.Process) -> int:
    """Bytes; what processes share, as forked ones do, is divided among them where the system can tell."""
    with suppress(psutil.NoSuchProcess):
        try:
            memory = process.memory_full_info()
        except psutil.AccessDenied:
            return int(process.memory_info().rss)
        return int(getattr(memory, "pss", memory.uss))
    return 0
