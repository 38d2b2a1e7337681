"""The tool `python`: runs a program in a sandbox, under limits, and answers with what it printed.

An exception of the program, a timeout or an exceeded limit is an answer, not a failure of the tool.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, ClassVar

from asyncrl.config.schema import ActorConfig
from asyncrl.errors import ConfigError
from asyncrl.sandbox import sandbox
from asyncrl.sandbox.sandboxes import THIS_MACHINE, Sandbox, check_sandbox, open_sandbox
from asyncrl.tools.base import Tool

LARGEST_LIMIT = 1e9
"""Finite limits of this many seconds or megabytes are mistakes, which the kernel refuses."""


class PythonSandbox(Tool):
    """Runs each call in a new process, or container, and in a new folder. No names or files are kept between calls."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "python",
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the program"}},
            "required": ["code"],
        },
    }

    backend: ClassVar[Sandbox] = THIS_MACHINE
    slots: ClassVar[AbstractAsyncContextManager[Any]] = nullcontext()

    @classmethod
    def configured(cls, actor: ActorConfig) -> type[Tool]:
        if actor.sandbox.kind == "builtin":
            return cls
        known = {
            "backend": open_sandbox(actor.sandbox),
            "slots": asyncio.Semaphore(actor.sandbox.at_once),
            # The sandbox limits the time of the program itself. `actor.tool_timeout_s` would also count the time in
            # which a container starts.
            "limits_itself": True,
        }
        return type(cls.__name__, (cls,), known)

    @classmethod
    def prepare(cls) -> None:
        prepare_sandbox(cls.backend)

    async def create(
        self, wall_s: float | None = None, cpu_s: float | None = None, memory_mb: int | None = None, **kwargs: Any
    ) -> None:
        """Set the limits of a program: by default 8 s of wall time, 4 s of processor time and 1024 MB.

        With `actor.sandbox.kind=builtin`, `wall_s` must stay below `actor.tool_timeout_s`. If it does not, slow
        programs count as failures of the tool. Raises ValueError: a limit is malformed.
        """
        self._limits = read_limits(wall_s=wall_s, cpu_s=cpu_s, memory_mb=memory_mb)

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        async with self.slots:
            ran = await self.backend.run(arguments["code"], self._limits)
        printed = ran.printed.strip()
        note = remark(ran, self._limits) or ("" if printed else "(no output; print what you want to see)")
        return "\n".join(part for part in (printed, note) if part)


def read_limits(**given: Any) -> sandbox.SandboxLimits:
    """Read the limits that a row of data gives by name; None: the default. Raises ValueError: a limit is malformed."""
    known = {name: limit for name, limit in given.items() if limit is not None}
    for name, limit in known.items():
        whole = name == "memory_mb"
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        # A comparison with nan is false, so this also refuses nan.
        in_range = is_number and (0 < limit < LARGEST_LIMIT or (limit == math.inf and not whole))
        if not in_range or (whole and limit % 1):
            number = f"{'whole ' if whole else ''}number above 0 and below {LARGEST_LIMIT:g}"
            raise ValueError(f"{name} is {limit!r:.100}; it must be a {number}")
    if "memory_mb" in known:
        # A column of whole numbers with nulls may become one of floats.
        known["memory_mb"] = int(known["memory_mb"])
    return sandbox.SandboxLimits(**known)


def prepare_sandbox(opened: Sandbox) -> None:
    """Check that the sandbox runs programs here, and warn if it lacks isolation. Raises ConfigError if it cannot run
    programs."""
    try:
        check_sandbox(opened)
    except sandbox.SandboxError as error:
        raise ConfigError(f"actor.sandbox: {error}") from error


def remark(ran: sandbox.ProgramResult, limits: sandbox.SandboxLimits) -> str:
    """A sentence for the policy about why the program failed. It is empty if the program succeeded."""
    if ran.status is None:
        return f"Error: stopped after {limits.wall_s:g} s."
    if ran.reason:
        return f"Error: {ran.reason}."
    if ran.killed:
        time = f"more than {math.ceil(limits.cpu_s)} s of CPU time, " if math.isfinite(limits.cpu_s) else ""
        return f"Error: stopped because of {time}too little memory or too many processes."
    return f"Error: the program ended with status {ran.status}." if ran.status else ""
