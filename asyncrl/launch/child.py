"""A process of ours: its output in a log, and it does not outlive us."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

PR_SET_PDEATHSIG = 1


def start_child(
    command: Sequence[str], log: Path, environment: Mapping[str, str], death_signal: int = signal.SIGTERM
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, with `environment` added to ours and its output appended to `log`.

    It gets `death_signal` when the thread that calls this ends, however that comes about (Linux only).
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=partial(_end_with_parent, death_signal) if sys.platform == "linux" else None,
        )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a child with its own children, also those that it left behind, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def _end_with_parent(death_signal: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death_signal)
