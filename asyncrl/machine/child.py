"""Starts child processes that do not outlive their parent. `guard.py` is the program that ensures this.

`start_child` and `ending_with_parent` start programs that end their own children. `start_guarded` and `Guarded` start
programs that do not end their own children: all processes that such a program started are killed with it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from asyncrl.machine import guard
from asyncrl.machine.identity import ProcessIdentity
from asyncrl.machine.numa import cpus_near_gpus, format_cpus

logger = logging.getLogger(__name__)

_GUARD = (sys.executable, "-I", "-S", guard.__file__)


def start_child(
    command: Sequence[str], log: Path, environment: Mapping[str, str], near_gpus: bool = True
) -> subprocess.Popen[bytes]:
    """Start `command` in a new session, with `environment` added to this process's environment, and its output appended
    to `log`. With `near_gpus` the child is bound to the CPUs near to its GPUs, if that helps, and the log has a line
    about it.

    On Linux the kernel sends the child SIGTERM when the thread that called this ends, for any reason.
    """
    near = cpus_near_gpus({**os.environ, **environment}) if near_gpus else frozenset[int]()
    if near:
        with suppress(OSError), opened_log(log) as output:  # On a full disk the child starts without the line.
            output.write(f"asyncrl: bound to the CPUs {format_cpus(near)}, which are near to its GPUs\n".encode())
    return _start(ending_with_parent(command, signal.SIGTERM, near), log, environment, stdin=subprocess.DEVNULL)


def start_guarded(
    command: Sequence[str], log: Path, environment: Mapping[str, str], files: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a program that reads no input, and does not end its own children. The program's whole group is killed by
    `kill_group`, or when this process ends. The program inherits the descriptors `files`, which stay open until the
    whole group has ended."""
    # The guard watches this pipe, which `kill_group` closes.
    return _start([*_GUARD, "kill", "0", *command], log, environment, stdin=subprocess.PIPE, pass_fds=files)


class Guarded:
    """A program that does not end its own children, and whose pipes the caller makes. The caller starts `self.command`
    in a new session, with the descriptors `self.files`. This command becomes the program in the same process. All
    processes that the program started are killed by `close`, or when this process ends."""

    def __init__(self, command: Sequence[str]) -> None:
        watched, self._held = os.pipe()
        self.files = [watched]
        self.command = [*_GUARD, "kill", str(watched), *command]

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the rest of the program's processes. A second call does nothing."""
        for each in (*self.files, self._held) if self.files else ():
            os.close(each)
        self.files = []


def _start(
    command: Sequence[str], log: Path, environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    with opened_log(log) as output:
        return subprocess.Popen(
            list(command),
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,
            **options,
        )


def opened_log(log: Path) -> BinaryIO:
    """Open the log to append to it. If it cannot be opened, as on a full disk, returns /dev/null, so that the process
    can start."""
    try:
        return log.open("ab")
    except OSError as error:
        logger.warning("%s cannot be written, so the output of its process is lost: %s", log, error)
        return Path(os.devnull).open("ab")


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a child and its own children, orphans too, and wait for the child."""
    kill_group_soon(process)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def kill_group_soon(process: subprocess.Popen[Any]) -> None:
    """Do the same as `kill_group`, without waiting: a process that hangs in the kernel may never end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def group_has_ended(group: int) -> bool:
    """True if every process of a group has ended. The memory of a killed process is freed a while after the kill."""
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group and ProcessIdentity.of(pid) is not None:
                return False
    return True


def last_lines(log: Path, count: int = 15, start: int = 0) -> str:
    """Return the last `count` lines of a log after its first `start` bytes, or an empty text if there is no log."""
    if not log.exists():
        return ""
    with log.open(errors="replace") as file:
        file.seek(start)
        return "\n".join(file.read().splitlines()[-count:])


def ending_with_parent(command: Sequence[str], number: signal.Signals, cpus: frozenset[int] = frozenset()) -> list[str]:
    """Return a command that becomes `command` in the same process, and runs only on `cpus` if there are any. The kernel
    sends the process the signal `number` when the thread that started it ends. On systems other than Linux, returns
    `command` itself. Raises FileNotFoundError: the program does not exist.
    """
    # A child of a process with threads must not run Python between fork and exec (preexec_fn): such children hung, or
    # crashed.
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if sys.platform != "linux":
        return list(command)
    words = map(str, (int(number), os.getpid(), ",".join(map(str, sorted(cpus)))))
    return [*_GUARD, "signal", *words, *command]
