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
        note = remark(ran, self._limits) or ("" if printed else "(no output; print what you want to see)")
        return "\n".join(part for part in (printed, note) if part)


def remark(ran: sandbox.ProgramResult, limits: sandbox.SandboxLimits) -> str:
    """How the program ended; empty where it ended well."""
    if ran.status is None:
        return f"Error: stopped after {limits.wall_s:g} s."
    if ran.killed:
        time = f"after {math.ceil(limits.cpu_s)} s of CPU time, " if math.isfinite(limits.cpu_s) else ""
        return f"Error: stopped, {time}for want of memory or for too many processes."
    return f"Error: the program ended with status {ran.status}." if ran.status else ""
