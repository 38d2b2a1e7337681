"""A process of ours: its output in a log, and it does not outlive us."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
_GUARDED = 'exec 3<&0 </dev/null; { read -r _ <&3; kill -s KILL 0; } & exec 3<&-; exec "$@"'
"""A shell that becomes its arguments, and leaves a guard behind which kills the group once its input has ended."""


def start_child(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, with `environment` added to ours and its output appended to `log`.

    It is asked to stop when the thread that calls this ends, however that comes about (Linux only).
    """
    ending = ending_with_parent(signal.SIGTERM)
    return _start(command, log, environment, stdin=subprocess.DEVNULL, preexec_fn=ending)


def start_guarded(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """As `start_child`, for a program that would not take its own processes with it: all of its group is killed as soon
    as this process, or what is returned here, is gone."""
    return _start(["/bin/sh", "-c", _GUARDED, "sh", *command], log, environment, stdin=subprocess.PIPE)


def _start(
    command: Sequence[str], log: Path, environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    with _opened(log) as output:
        return subprocess.Popen(
            list(command),
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,
            **options,
        )


def _opened(log: Path) -> BinaryIO:
    """The log, to append to; nowhere where it cannot be opened, as on a full disk: a log is no reason not to start."""
    try:
        return log.open("ab")
    except OSError as error:
        logger.warning("%s cannot be written, what its process prints is lost: %s", log, error)
        return Path(os.devnull).open("ab")


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a child with its own children, also those that it left behind, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log, or nothing where there is none."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def ending_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """What a child runs before its program so that the kernel sends it `number` when the thread that started it ends,
    however that comes about; None where the kernel is not Linux."""
    if sys.platform != "linux":
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)
        # A parent that ended before the kernel knew of this is not noticed any more.
        if os.getppid() != parent:
            os.kill(os.getpid(), number)

    return prepare
