"""The tool `python`: runs a program in a process of its own, under limits, and answers with what it printed.

An exception of the program, a timeout or an exceeded limit is an answer, not a failure of the tool.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from asyncrl.actor.tools.base import Tool
from asyncrl.machine import sandbox


class PythonSandbox(Tool):
    """Each call is a new process in a new folder: no names or files are kept between calls."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "python",
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the program"}},
            "required": ["code"],
        },
    }

    @classmethod
    def prepare(cls) -> None:
        sandbox.why_no_namespaces()

    async def create(self, wall_s: float = 8.0, cpu_s: float = 4.0, memory_mb: int = 1024, **kwargs: Any) -> None:
        """`wall_s` must stay below `actor.tool_timeout_s`, else slow programs count as failures of the tool."""
        self._limits = sandbox.SandboxLimits(wall_s, cpu_s, memory_mb)

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        ran = await sandbox.run(arguments["code"], self._limits)
        printed = ran.printed.strip()
        return "\n".join(part for part in (printed, self._remark(ran, printed)) if part)

    def _remark(self, ran: sandbox.ProgramResult, printed: str) -> str:
        if ran.status is None:
            return f"Error: stopped after {self._limits.wall_s:g} s."
        if ran.killed:
            seconds = math.ceil(self._limits.cpu_s)
            return f"Error: stopped, after {seconds} s of CPU time, for want of memory or for too many processes."
        if ran.status:
            return f"Error: the program ended with status {ran.status}."
        return "" if printed else "(no output; print what you want to see)"
