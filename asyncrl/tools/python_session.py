"""The tool `python_session`: a Python interpreter for each episode, which keeps the variables that calls define.

A call is like a cell of a notebook. An exception of the code is an answer, not a failure of the tool.

A call that takes too long, or that ends the interpreter, ends the session. The answer to this call says that the
variables are lost. The next call begins a new session.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import psutil

from asyncrl.config.schema import ActorConfig
from asyncrl.errors import ConfigError
from asyncrl.sandbox.containers import ContainerSandbox
from asyncrl.sandbox.sandboxes import CONTAINERS, Sandbox, open_sandbox
from asyncrl.sandbox.session import SessionServer
from asyncrl.tools.base import Tool
from asyncrl.tools.python_sandbox import prepare_sandbox, read_limits, remark
from asyncrl.tools.sessions import EpisodeSession, SessionService

LOST = "The session was restarted: its variables, imports and files are lost."


class PythonSession(Tool):
    """Runs cells. The policy calls it `python`, like the tool without a state, so the same tasks work with both
    tools."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "python",
        "description": (
            "Runs Python code, and returns what it prints and the value of its last expression. Variables, imports and "
            "files are kept between calls."
        ),
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the code"}},
            "required": ["code"],
        },
    }
    # The session limits the time of a cell, but not the time that a call waits for memory before its cell runs.
    limits_itself: ClassVar[bool] = True
    service: ClassVar[SessionService]
    backend: ClassVar[Sandbox]
    session: EpisodeSession

    @classmethod
    def configured(cls, actor: ActorConfig) -> type[Tool]:
        if actor.sandbox.kind == "http":
            raise ConfigError("actor.sandbox.kind=http: a server keeps no sessions; python_session needs another kind")
        server: SessionServer | ContainerSandbox = SessionServer()
        if actor.sandbox.kind in CONTAINERS:
            server = ContainerSandbox(actor.sandbox.kind, actor.sandbox.image, actor.sandbox.arguments)
        total_mb = actor.sandbox.memory_mb or psutil.virtual_memory().total // 2 >> 20
        service = SessionService(server.start, server.close, total_mb)
        return type(cls.__name__, (cls,), {"service": service, "backend": open_sandbox(actor.sandbox)})

    @classmethod
    def prepare(cls) -> None:
        prepare_sandbox(cls.backend)

    async def create(self, wall_s: float | None = None, memory_mb: int | None = None, **kwargs: Any) -> None:
        """Set the limits: by default 8 s for each cell, and 1024 MB. Raises ValueError: a limit is malformed or too
        large."""
        self._limits = replace(read_limits(wall_s=wall_s, memory_mb=memory_mb), cpu_s=math.inf)
        own_mb, total_mb = self._limits.memory_mb, self.service.budget.total_mb
        if own_mb > total_mb:
            raise ValueError(
                f"memory_mb={own_mb} is more than actor.sandbox.memory_mb={total_mb}, the limit of all sessions"
            )

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        ran = await self.session.run(arguments["code"], self._limits)
        printed = ran.printed.strip()
        if ran.status == 0:
            return printed or "(no output)"
        return "\n".join(part for part in (printed, remark(ran, self._limits), LOST) if part)
