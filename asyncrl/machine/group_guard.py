"""Kills groups of processes as soon as the process that started them is gone, however it ended.

`GroupGuard` starts this file as a program, which reads from its input which groups there are. When the input ends, it
kills those that are left. One such process is enough for any number of groups.

The program imports nothing of asyncrl, so that it starts at once and stays small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


class GroupGuard:
    """The guard's side in the process that starts the groups. The program starts with the first group. If it was
    killed, as for want of memory, another one takes its place at the next change."""

    def __init__(self) -> None:
        self._groups = set[int]()
        self._program: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> GroupGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, group: int) -> None:
        """Kill `group` if this process ends before `forget`. Where no guard can be started, nobody does."""
        with self._lock:
            self._groups.add(group)
            self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """The group has ended."""
        with self._lock:
            self._groups.discard(group)
            self._tell(f"-{group}")

    def close(self) -> None:
        """End the program, which kills the groups that were not forgotten."""
        with self._lock:
            program, self._program = self._program, None
        if program is not None and program.stdin is not None:
            with contextlib.suppress(OSError):
                program.stdin.close()
            program.wait()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            if self._program is None or self._program.poll() is not None:
                self._start()
                line = "\n".join(f"+{group}" for group in self._groups)
            if line and self._program is not None and self._program.stdin is not None:
                self._program.stdin.write(f"{line}\n".encode())
                self._program.stdin.flush()

    def _start(self) -> None:
        before, self._program = self._program, None
        if before is not None and before.stdin is not None:
            with contextlib.suppress(OSError):
                before.stdin.close()
        command = [sys.executable, "-I", "-S", str(Path(__file__))]
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def main() -> None:
    """Read lines +GROUP and -GROUP until the input ends."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    groups = set[int]()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
