"""Runs a Python program in a new process, under limits, for tools and verifiers.

If Linux grants namespaces, the program is isolated. It sees Python and the system's programs, read-only, and a private
folder of bounded size, but no other files, no other processes and no network. Without namespaces only the limits
apply; docs/security.md describes them. When the call ends, for any reason, every process that the program has started
ends too.

asyncrl makes the namespaces itself, without the program bubblewrap. That program needs the same permission from the
kernel, is not installed on every machine, and would replace only the code that makes mounts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from asyncrl.errors import AsyncrlError
from asyncrl.sandbox.child.options import FOLDER_PREFIX
from asyncrl.sandbox.child.watching import BEGUN

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
MAX_OUTPUT_BYTES = 1 << 20
"""The maximum number of bytes in a program's output, and in each file that the program writes."""
_KILLED = 128 + signal.SIGKILL
_CHECK_S = 60.0

_SYSTEM = (
    *("/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/sbin", "/usr"),
    *(f"/dev/{name}" for name in ("full", "null", "random", "urandom", "zero")),
    *(f"/etc/{name}" for name in ("alternatives", "group", "ld.so.cache", "localtime", "passwd", "ssl/certs")),
)
_OF_PYTHON = ("bin", "lib", "lib64", "pyvenv.cfg")


class SandboxError(AsyncrlError):
    """The program could not be run because of a fault of this machine, not of the program."""


class NotBegunError(SandboxError):
    """The program's time ended before its first line."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of a program.

    - `wall_s`: seconds of wall time. `cpu_s`: seconds of CPU time, rounded up; infinite for no limit.
    - `memory_mb`: megabytes of memory. The same limit holds for each process, and for all processes together.
    - `processes`: how many processes and threads may exist at once.
    - `disk_mb`: how many megabytes each of the private folders /tmp and /dev/shm may hold.
    """

    wall_s: float = 8.0
    cpu_s: float = 4.0
    memory_mb: int = 1024
    processes: int = 64
    disk_mb: int = 64


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The output of a program and its exit status, which is None if its time ran out.

    `seconds` is the program's running time, if the sandbox measured it more exactly than its caller can. `reason` says
    why the program was stopped, if the status does not show it.
    """

    printed: str
    status: int | None
    seconds: float | None = field(default=None, compare=False)
    reason: str = ""

    @property
    def killed(self) -> bool:
        """True if the program was killed because of CPU time, memory or the number of its processes."""
        return self.status == _KILLED


@cache
def why_no_namespaces() -> str:
    """Return the reason why programs cannot have namespaces here, and log a warning. Return an empty text if they
    can."""
    limits = SandboxLimits(wall_s=_CHECK_S, cpu_s=_CHECK_S)
    try:
        # The coroutine runs in a new thread, because the calling thread may already have a running event loop.
        with ThreadPoolExecutor(1) as thread:
            ran = thread.submit(lambda: asyncio.run(run("import ctypes, json", limits, namespaces=True))).result()
        reason = "" if ran.status == 0 else ran.printed.strip() or f"Python ended with status {ran.status}"
    except SandboxError as error:
        reason = str(error)
    if reason:
        log.warning(
            "programs of the policy run without namespaces (%s), so they can reach files and networks of this machine; "
            "docs/security.md says what still protects it, and how to get namespaces",
            reason,
        )
    return reason


async def run(
    program: str,
    limits: SandboxLimits,
    *,
    stdin: bytes = b"",
    fds: Sequence[int] = (),
    errors: bool = True,
    namespaces: bool | None = None,
) -> ProgramResult:
    """Run `program` in an empty folder that is deleted afterwards.

    The program reads `stdin` and has the open files `fds`. With `errors` its standard error is part of the output. The
    program runs in new namespaces if `namespaces` is true, and without namespaces if it is false. With None it runs in
    new namespaces if this machine grants them. Raises SandboxError.
    """
    if namespaces is None:
        namespaces = not await asyncio.to_thread(why_no_namespaces)
    with ExitStack() as stack:
        source, given, output = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        folder = "/tmp"
        if not namespaces:
            made = tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True)
            folder = stack.enter_context(made)
        for file, content in ((source, program.encode(errors="replace")), (given, stdin)):
            file.write(content)
            file.seek(0)
        ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
        process = await asyncio.create_subprocess_exec(
            *child_command("main"),
            *map(str, (theirs.fileno(), source.fileno())),
            *child_arguments(limits, namespaces),
            stdin=given,
            stdout=output,
            stderr=output if errors else subprocess.DEVNULL,
            cwd="/" if namespaces else folder,
            env=child_environment(folder),
            pass_fds=[theirs.fileno(), source.fileno(), *fds],
            start_new_session=True,
        )
        theirs.close()
        report = await _report(process, ours, limits.wall_s)
        output.seek(0)
        printed = output.read(MAX_OUTPUT_BYTES).decode(errors="replace")
        return result_of(printed, None if report is None else _after_start(report, printed), namespaces)


def child_command(module: str) -> list[str]:
    """Return the command that runs the `main` of a `module` of child/, without the arguments."""
    path = f"sys.path.insert(0, {str(_PACKAGE.parent)!r})"
    code = f"import sys; {path}; from asyncrl.sandbox.child.{module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code]


def child_arguments(limits: SandboxLimits, namespaces: bool) -> list[str]:
    """Return the launcher's arguments after its first two, which are the control socket and the program's file.
    `Options` reads them."""
    cpu_s = math.ceil(limits.cpu_s) if math.isfinite(limits.cpu_s) else resource.RLIM_INFINITY
    sizes = (limits.memory_mb << 20, MAX_OUTPUT_BYTES, limits.disk_mb << 20)
    return [*map(str, (int(namespaces), cpu_s, *sizes, limits.processes)), *(_visible() if namespaces else ())]


async def _report(process: asyncio.subprocess.Process, control: socket.socket, wall_s: float) -> str | None:
    """Wait for the watcher's report. Returns None if `wall_s` seconds pass without it. In either case all processes of
    the call have ended. Raises NotBegunError."""
    control.setblocking(False)
    report = b""
    try:
        async with asyncio.timeout(wall_s):
            while report in (b"", BEGUN) and (part := await asyncio.get_running_loop().sock_recv(control, 8192)):
                report += part
            return report.decode(errors="replace")
    except TimeoutError as error:
        # A busy event loop may not have read the report yet.
        with suppress(BlockingIOError):
            report = report or control.recv(8192)
        if report.startswith(BEGUN):
            return None
        raise NotBegunError(
            f"a program could not begin within its {wall_s:.3g} s: run fewer programs at once, or raise wall_s"
        ) from error
    finally:
        # The watcher ends when the connection ends. `close` would not end the connection, because a fork of this
        # process may hold a copy of the socket.
        control.shutdown(socket.SHUT_RDWR)
        ended = asyncio.ensure_future(process.wait())
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            await ended
            raise


def _after_start(report: str, printed: str) -> str:
    """The report without the line BEGUN. Raises SandboxError: the program ended before its first line."""
    started, line, ended = report.partition(BEGUN.decode())
    if line or started.startswith("failed"):
        return started + ended
    reason = f"{started.strip() or 'its watcher was killed'} {printed.strip()[-500:]}".strip()
    raise SandboxError(f"a program ended before its first line: {reason}")


def result_of(printed: str, report: str | None, namespaces: bool) -> ProgramResult:
    """Read a program's result from the watcher's report. Raises SandboxError: the program could not be run."""
    if report is None:
        return ProgramResult(printed, None)
    if not report and not namespaces:
        # The watcher was killed without a report. It runs as the program's user, so the program must have killed it.
        return ProgramResult(printed, _KILLED)
    kind, _, detail = report.partition(" ")
    if kind != "status":
        raise SandboxError(f"a program could not be run: {detail or 'its watcher was killed'}")
    status, _, reason = detail.partition(" ")
    return ProgramResult(printed, int(status), reason=reason)


def _visible() -> list[str]:
    """Return the paths that a program may see: those that Python and the system's programs need, and asyncrl's code.
    Runs, keys and home folders are not among them."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).resolve().parents[1])}
    python = [f"{prefix}/{name}" for prefix in sorted(prefixes) for name in _OF_PYTHON]
    return [each for each in (*_SYSTEM, *python, str(_PACKAGE)) if Path(each).exists()]


def child_environment(folder: str) -> dict[str, str]:
    """Return an environment without the caller's variables, which may hold keys.

    It lets each library use only one thread, because the threads of a pool count against the memory limit.
    """
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
