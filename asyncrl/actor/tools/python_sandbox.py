"""The tool `python`: runs a program in a process of its own, under limits, and answers with what it printed.

An exception, a time-out or a limit that the program met is an answer, not a failure of the tool. This keeps accidents
away from the actor; it is no jail for an attacker (docs/writing_a_tool.md says what is isolated, and what is not).
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, ClassVar

from asyncrl.actor.tools.base import Tool

CHILD = Path(__file__).with_name("sandbox_child.py")
_MAX_FILE_BYTES = 1 << 20
_KILLED = 128 + signal.SIGKILL


class PythonSandbox(Tool):
    """Each call starts anew: no names or files are kept between calls."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "python",
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the program"}},
            "required": ["code"],
        },
    }

    async def create(self, wall_s: float = 8.0, cpu_s: float = 4.0, memory_mb: int = 1024, **kwargs: Any) -> None:
        """`wall_s` must stay below `actor.tool_timeout_s`, else slow programs count as failures of the tool."""
        self._wall_s, self._cpu_s, self._memory_mb = wall_s, math.ceil(cpu_s), memory_mb

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        with (
            tempfile.TemporaryDirectory(prefix="asyncrl-python-", ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as program,
            tempfile.TemporaryFile() as output,
        ):
            program.write(arguments["code"].encode())
            program.seek(0)
            status = await self._run(program, output, folder)
            output.seek(0)
            printed = output.read(_MAX_FILE_BYTES).decode(errors="replace").strip()
        return "\n".join(part for part in (printed, self._remark(status, printed)) if part)

    async def _run(self, program: IO[bytes], output: IO[bytes], folder: str) -> int | None:
        """The exit status, or None where the time was over. Whatever happens, the process group is killed."""
        limits = (self._cpu_s, self._memory_mb << 20, _MAX_FILE_BYTES)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(CHILD), *map(str, limits)),
            stdin=program,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._wall_s):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    def _remark(self, status: int | None, printed: str) -> str:
        if status is None:
            return f"Error: stopped after {self._wall_s:g} s."
        if status in (_KILLED, -signal.SIGKILL):
            return f"Error: stopped, after {self._cpu_s} s of CPU time or for want of memory."
        if status:
            return f"Error: the program ended with status {status}."
        return "" if printed else "(no output; print what you want to see)"


def _environment(folder: str) -> dict[str, str]:
    """Nothing of the actor's own environment: it may hold keys. Thread pools would count against the memory limit."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
