"""Runs programs of the policy in containers, with docker or podman.

A container has no network, no capabilities, a read-only image, a private /tmp, and limits on memory, processors,
processes and files. Its first process (`child/container.py`) starts the program, ends it when its time is over, and
reports the result. The start of the container does not count as time of the program. The container ends with its
caller.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from asyncrl.machine.child import Guarded
from asyncrl.machine.finishing import finish
from asyncrl.machine.program import start_program
from asyncrl.sandbox.sandbox import MAX_OUTPUT_BYTES, ProgramResult, SandboxError, SandboxLimits

logger = logging.getLogger(__name__)

INSTALL = {
    "docker": "install Docker Engine (https://docs.docker.com/engine/install)",
    "podman": "install podman (https://podman.io/docs/installation)",
}
NOBODY = "65534:65534"
START_S = 60.0
"""The maximum seconds that a container may take to start. The report on a program, too, may arrive this many seconds
after the program's time limit."""

_END_S = 20.0
_LONGEST_REPORT = 8 * MAX_OUTPUT_BYTES
_STDERR_CHARS = 500
_CHILD = Path(__file__).with_name("child")


class Container:
    """One running container. `started` is the process of docker or podman that is attached to the container."""

    def __init__(self, program: str, name: str, started: Process, guard: Guarded) -> None:
        self._program = program
        self._name = name
        self._started = started
        self._guard = guard
        self._errors = asyncio.ensure_future(_tail(started))

    async def request(self, request: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        """Send a request and wait for the report. Raises SandboxError."""
        assert self._started.stdin is not None
        assert self._started.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                self._started.stdin.write(json.dumps(request).encode() + b"\n")
                await self._started.stdin.drain()
                line = await self._started.stdout.readline()
                if not line:
                    raise SandboxError(f"{self._program}: {await self._errors or 'the container ended'}")
            report = json.loads(line)
            texts = {key: str(report[key]) for key in ("output", "reason")}
            return {"status": report["status"], "seconds": float(report["seconds"]), **texts}
        except TimeoutError as error:
            raise SandboxError(f"{self._program}: the container did not answer within {seconds:g} s") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SandboxError(f"{self._program}: the container's answer cannot be used: {error!r:.200}") from error

    async def end(self) -> None:
        """End the container, and wait for its end."""
        assert self._started.stdin is not None
        # The container's first process ends when its input ends, and then the container ends.
        self._started.stdin.close()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._started.wait()
                    return
            await self._remove()
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._started.pid, signal.SIGKILL)
            self._guard.close()
            self._errors.cancel()

    async def _remove(self) -> None:
        try:
            remove = await asyncio.create_subprocess_exec(
                *(self._program, "rm", "--force", self._name),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            logger.warning("the container %s could not be removed: %s", self._name, error)
            return
        try:
            async with asyncio.timeout(_END_S):
                await remove.wait()
        except TimeoutError:
            remove.kill()


class ContainerSession:
    """An interpreter that runs cells in a container, with the methods of `Interpreter`."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._is_open = True

    async def run(self, code: str, wall_s: float) -> ProgramResult:
        """Run a cell, see `Interpreter.run`."""
        try:
            report = await self._container.request({"code": code, "wall_s": wall_s}, wall_s + START_S)
        except BaseException:
            await self.close()
            raise
        if report["status"] != 0:
            await self.close()
        return _result(report)

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            await self._container.end()


class ContainerSandbox:
    """Starts containers of `image` by the command `run` of `program` (docker or podman), with additional
    `arguments`."""

    def __init__(self, program: str, image: str, arguments: Sequence[str] = ()) -> None:
        self._program = program
        self._image = image
        self._arguments = arguments
        self._guards = WeakSet[Guarded]()

    async def check(self) -> None:
        """Check that programs can run here. Raises SandboxError, which names what to install, if they cannot."""
        if shutil.which(self._program) is None:
            raise SandboxError(f"there is no program {self._program} on this host: {INSTALL[self._program]}")
        try:
            ran = await self.run("print(1)", SandboxLimits(wall_s=START_S))
        except SandboxError as error:
            mend = f"`{self._program} pull {self._image}` gets the image, and `{self._program} info` must work"
            raise SandboxError(f"no container starts: {error}; {mend}") from error
        if ran.printed != "1\n":
            raise SandboxError(f"{self._image} does not run Python as python3: {ran.printed.strip()[-_STDERR_CHARS:]}")

    async def run(
        self, program: str, limits: SandboxLimits, *, stdin: bytes = b"", errors: bool = True
    ) -> ProgramResult:
        """Run a program, see `sandbox.run`. Raises SandboxError."""
        container = await self._start(limits)
        try:
            request = {
                "program": program,
                "stdin": stdin.decode(errors="replace"),
                "errors": errors,
                "wall_s": limits.wall_s,
            }
            return _result(await container.request(request, limits.wall_s + START_S))
        finally:
            await finish(container.end())

    async def start(self, limits: SandboxLimits) -> ContainerSession:
        """Start a container whose Python runs cells. Raises SandboxError."""
        container = await self._start(limits)
        try:
            report = await container.request({}, START_S)
            if report["status"] != 0:
                raise SandboxError(f"a session did not start: {report['output'].strip()[-_STDERR_CHARS:]}")
        except BaseException:
            await finish(container.end())
            raise
        return ContainerSession(container)

    def close(self) -> None:
        """End all open containers."""
        for each in self._guards:
            each.close()

    def command(self, name: str, limits: SandboxLimits) -> list[str]:
        """Return the command that starts a container called `name`."""
        cpu = [f"--ulimit=cpu={math.ceil(limits.cpu_s)}"] if math.isfinite(limits.cpu_s) else []
        texts = [(_CHILD / f"{file}.py").read_text() for file in ("container", "cells", "pausing")]
        return [
            *(self._program, "run", "--rm", "--interactive", f"--name={name}", "--pull=never", "--log-driver=none"),
            *("--network=none", "--read-only", f"--tmpfs=/tmp:rw,size={limits.disk_mb}m,mode=1777", "--workdir=/tmp"),
            *(f"--memory={limits.memory_mb}m", f"--memory-swap={limits.memory_mb}m", "--cpus=1"),
            # The limit is higher by 1, because the container's first process counts, too.
            *(f"--pids-limit={limits.processes + 1}", "--ulimit=core=0", *cpu),
            *("--ulimit=nofile=64:64", "--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={NOBODY}"),
            *("--env=HOME=/tmp", "--env=OMP_NUM_THREADS=1", "--env=OPENBLAS_NUM_THREADS=1"),
            *(*self._arguments, self._image, "python3", "-I", "-c", *texts),
        ]

    async def _start(self, limits: SandboxLimits) -> Container:
        name = f"asyncrl-{uuid.uuid4().hex}"
        guard = Guarded(self.command(name, limits))
        try:
            transport, protocol = await start_program(
                guard.command,
                _LONGEST_REPORT,
                # docker and podman may write files into their working directory.
                cwd=tempfile.gettempdir(),
                pass_fds=guard.files,
            )
        except BaseException as error:
            guard.close()
            if isinstance(error, OSError):
                raise SandboxError(f"{self._program} cannot be started: {error}") from error
            raise
        self._guards.add(guard)
        started = Process(transport, protocol, asyncio.get_running_loop())
        return Container(self._program, name, started, guard)


def _result(report: Mapping[str, Any]) -> ProgramResult:
    return ProgramResult(report["output"], report["status"], report["seconds"], report["reason"])


async def _tail(started: Process) -> str:
    """Wait until docker or podman ends, and return the end of its standard error."""
    assert started.stderr is not None
    kept = b""
    while part := await started.stderr.read(1 << 12):
        kept = (kept + part)[-4 * _STDERR_CHARS :]
    return kept.decode(errors="replace").strip()[-_STDERR_CHARS:]
