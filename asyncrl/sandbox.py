"""Runs a Python program in a process of its own, under limits, for tools and verifiers.

This keeps accidents away from the caller; it is no jail for an attacker (docs/writing_a_tool.md says what is isolated,
and what is not).
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

CHILD = Path(__file__).with_name("sandbox_child.py")
_MAX_FILE_BYTES = 1 << 20
_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds on the wall and of CPU time (rounded up), and megabytes of memory."""

    wall_s: float = 8.0
    cpu_s: float = 4.0
    memory_mb: int = 1024


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a program: what it printed, errors included, and its exit status, None where the time was over."""

    printed: str
    status: int | None

    @property
    def killed(self) -> bool:
        """It was stopped for CPU time or memory."""
        return self.status in (_KILLED, -signal.SIGKILL)


async def run(program: str, limits: Limits) -> Ran:
    """Run `program` in an empty folder that goes away with it. Whatever happens, all that it started is killed."""
    with (
        tempfile.TemporaryDirectory(prefix="asyncrl-python-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as output,
    ):
        source.write(program.encode())
        source.seek(0)
        status = await _run(source, output, folder, limits)
        output.seek(0)
        return Ran(output.read(_MAX_FILE_BYTES).decode(errors="replace"), status)


async def _run(source: IO[bytes], output: IO[bytes], folder: str, limits: Limits) -> int | None:
    arguments = (math.ceil(limits.cpu_s), limits.memory_mb << 20, _MAX_FILE_BYTES)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(CHILD), *map(str, arguments)),
        stdin=source,
        stdout=output,
        stderr=output,
        cwd=folder,
        env=_environment(folder),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limits.wall_s):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _environment(folder: str) -> dict[str, str]:
    """Nothing of the caller's own environment: it may hold keys. Thread pools would count against the memory limit."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
