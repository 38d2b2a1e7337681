"""Opens the sandbox that `actor.sandbox` names: the built-in one, containers, or a server of SandboxFusion."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from asyncrl.sandbox import sandbox
from asyncrl.sandbox.sandbox import ProgramResult, SandboxLimits

CONTAINERS = ("docker", "podman")


class Sandbox(Protocol):
    """Runs untrusted programs."""

    async def run(
        self, program: str, limits: SandboxLimits, *, stdin: bytes = b"", errors: bool = True
    ) -> ProgramResult:
        """Run a program, see `sandbox.run`. Raises SandboxError: the sandbox failed, and a retry may succeed."""
        ...

    async def check(self) -> None:
        """Check that programs can run here. Raises SandboxError, which names the remedy, if they cannot."""
        ...


class SandboxSettings(Protocol):
    """The settings of `actor.sandbox`."""

    @property
    def kind(self) -> str: ...
    @property
    def image(self) -> str: ...
    @property
    def arguments(self) -> Sequence[str]: ...
    @property
    def url(self) -> str | None: ...


class BuiltInSandbox:
    """Runs programs in processes of this machine."""

    async def run(
        self, program: str, limits: SandboxLimits, *, stdin: bytes = b"", errors: bool = True
    ) -> ProgramResult:
        return await sandbox.run(program, limits, stdin=stdin, errors=errors)

    async def check(self) -> None:
        """Log a warning if programs run without namespaces."""
        await asyncio.to_thread(sandbox.why_no_namespaces)


THIS_MACHINE: Sandbox = BuiltInSandbox()


def open_sandbox(settings: SandboxSettings) -> Sandbox:
    """Return the sandbox that the settings name."""
    if settings.kind in CONTAINERS:
        from asyncrl.sandbox.containers import ContainerSandbox

        return ContainerSandbox(settings.kind, settings.image, settings.arguments)
    if settings.url is not None:
        from asyncrl.sandbox.fusion import FusionSandbox

        return FusionSandbox(settings.url)
    return THIS_MACHINE


def check_sandbox(opened: Sandbox) -> None:
    """Check a sandbox. The calling thread may have a running event loop. Raises SandboxError as `check` does."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(opened.check())).result()
