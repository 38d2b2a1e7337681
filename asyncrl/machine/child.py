"""Child processes whose output goes to a log and that do not outlive their parent."""

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

_BECOME = """
import ctypes, os, signal, sys
number, parent, cpus = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
try:
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
except OSError:
    pass  # They may have been taken from us a moment ago; then it runs anywhere.
# The kernel does not notice a parent that ended before the call.
if os.getppid() != parent:
    os.kill(os.getpid(), number)
for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # By Python, and then by the program too.
    signal.signal(ignored, signal.SIG_DFL)
os.execvp(sys.argv[4], sys.argv[4:])
"""


def start_child(
    command: Sequence[str], log: Path, environment: Mapping[str, str], near_gpus: bool = True
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, with `environment` added to ours and its output appended to `log`. It is
    bound to the CPUs near to the GPUs that it sees, if `near_gpus` and where that helps; the log then says so.

    On Linux the kernel sends it SIGTERM when the thread that called this ends, for whatever reason.
    """
    near = cpus_near_gpus({**os.environ, **environment}) if near_gpus else frozenset[int]()
    if near:
        with suppress(OSError), opened_log(log) as output:  # On a full disk it starts without the line.
            output.write(f"asyncrl: bound to the CPUs {format_cpus(near)}, which are near to its GPUs\n".encode())
    return _start(ending_with_parent(command, signal.SIGTERM, near), log, environment, stdin=subprocess.DEVNULL)


def start_guarded(
    command: Sequence[str], log: Path, environment: Mapping[str, str], files: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a program that does not end its own children: its whole group is killed as soon as this process is gone, or
    by `kill_group`. It inherits the descriptors `files`, which also stay open until its group has ended."""
    return _start(guarded(command), log, environment, stdin=subprocess.PIPE, pass_fds=files)


def guarded(command: Sequence[str], given: int | None = None) -> list[str]:
    """A command that becomes `command` in the same process, which reads the descriptor `given`, or nothing. It is to be
    started in a session of its own with a pipe as its input: when that is closed, its group is killed."""
    return [sys.executable, "-I", "-S", guard.__file__, "-" if given is None else str(given), *command]


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
    """The log, to append to. Where it cannot be opened, as on a full disk, the output is discarded: the process starts
    without its log."""
    try:
        return log.open("ab")
    except OSError as error:
        logger.warning("%s cannot be written, so the output of its process is lost: %s", log, error)
        return Path(os.devnull).open("ab")


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a child and its own children, orphans too, and wait for it."""
    kill_group_soon(process)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def kill_group_soon(process: subprocess.Popen[Any]) -> None:
    """The same without waiting: a process that hangs in the kernel may never end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def group_has_ended(group: int) -> bool:
    """Whether no process of a group runs any more. What a killed process had is freed a while after the kill."""
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group and ProcessIdentity.of(pid) is not None:
                return False
    return True


def last_lines(log: Path, count: int = 15, start: int = 0) -> str:
    """The end of a log behind its first `start` bytes, or nothing where there is none."""
    if not log.exists():
        return ""
    with log.open(errors="replace") as file:
        file.seek(start)
        return "\n".join(file.read().splitlines()[-count:])


def ending_with_parent(command: Sequence[str], number: signal.Signals, cpus: frozenset[int] = frozenset()) -> list[str]:
    """A command that becomes `command` in the same process: the kernel sends it `number` when the thread that started
    it ends, and it runs on `cpus` alone, if there are any. The same command where the kernel is not Linux.

    Raises FileNotFoundError: there is no such program.
    """
    # The child of a process with threads may run no Python of ours before its program: it hung, or crashed.
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if sys.platform != "linux":
        return list(command)
    words = map(str, (int(number), os.getpid(), ",".join(map(str, sorted(cpus)))))
    return [sys.executable, "-I", "-S", "-c", _BECOME, *words, *command]
