"""Containers, started by a stub of docker and podman, and by a real one.

The variables ASYNCRL_CONTAINERS (docker or podman) and ASYNCRL_CONTAINER_IMAGE name the real one and an image with
python3."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from asyncrl.sandbox.child.pausing import RAN_IN_PAUSE
from asyncrl.sandbox.containers import ContainerSandbox
from asyncrl.sandbox.sandbox import ProgramResult, SandboxError, SandboxLimits
from tests.helpers import GENEROUS_S, async_until, child_with, living, until
from tests.sandbox.waking import TRAPS, WAKING

pytestmark = pytest.mark.slow

LIMITS = SandboxLimits(wall_s=GENEROUS_S, cpu_s=GENEROUS_S, memory_mb=200)
REAL, IMAGE = os.environ.get("ASYNCRL_CONTAINERS", ""), os.environ.get("ASYNCRL_CONTAINER_IMAGE", "")
MORE = shlex.split(os.environ.get("ASYNCRL_CONTAINER_ARGUMENTS", ""))
needs_containers = pytest.mark.skipif(not REAL, reason="ASYNCRL_CONTAINERS names no program")

Act = Callable[[ContainerSandbox], Awaitable[None]]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of a `podman` that runs programs without a container."""
    program = tmp_path / "podman"
    program.write_text(f"#!{sys.executable}\n" + Path(__file__).with_name("stub_container.py").read_text())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return program.with_suffix(".calls")


@pytest.fixture(params=["stub", pytest.param("real", marks=needs_containers)])
def named(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A program and an image."""
    if request.param == "real":
        return REAL, IMAGE
    request.getfixturevalue("stub")
    return "podman", "image"


def within(named: tuple[str, str], act: Act) -> None:
    async def main() -> None:
        sandbox = ContainerSandbox(*named, MORE)
        try:
            await act(sandbox)
        finally:
            sandbox.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("program", "printed", "status"),
    [
        ("print(input(), 'é')", "zwö é\n", 0),
        ("import sys; print('x'); sys.exit(125)", "x\n", 125),
        ("import os; print('x', flush=True); os.kill(os.getpid(), 9)", "x\n", 137),
        ("import os, sys; os.write(2, b'hidden'); print(__name__)", "__main__\n", 0),
        ("import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(0.2); print('x')", "x\n", 0),
    ],
)
def test_the_output_and_the_status_of_a_program(program: str, printed: str, status: int, named: tuple[str, str]):
    async def act(sandbox: ContainerSandbox) -> None:
        await sandbox.check()
        ran = await sandbox.run(program, LIMITS, stdin="zwö\n".encode(), errors=False)
        assert ran == ProgramResult(printed, status)
        assert ran.seconds is not None
        shown = await sandbox.run("1 / 0", LIMITS)
        assert shown.printed.startswith('Traceback (most recent call last):\n  File "<stdin>", line 1')
        assert shown.status == 1

    within(named, act)


def test_a_program_reads_all_of_a_long_input_and_cannot_write_as_much(named: tuple[str, str]):
    async def act(sandbox: ContainerSandbox) -> None:
        read = await sandbox.run("import sys; print(len(sys.stdin.read()))", LIMITS, stdin=b"x" * (3 << 20))
        assert read == ProgramResult(f"{3 << 20}\n", 0)
        wrote = await sandbox.run("import tempfile; tempfile.TemporaryFile().write(bytes(3 << 20))", LIMITS)
        assert "File too large" in wrote.printed

    within(named, act)


def test_the_time_of_a_program_is_over(named: tuple[str, str]):
    async def act(sandbox: ContainerSandbox) -> None:
        program = "print('begun', flush=True); import time; time.sleep(600)"
        assert await sandbox.run(program, SandboxLimits(wall_s=4.0)) == ProgramResult("begun\n", None)

    within(named, act)


def test_a_session_keeps_what_cells_define_until_one_ends_it(named: tuple[str, str]):
    async def act(sandbox: ContainerSandbox) -> None:
        session = await sandbox.start(SandboxLimits(cpu_s=math.inf))
        for code, printed in (("x = 5", ""), ("x + 1", "6\n"), ("open('kept', 'w').write('a')", "1\n")):
            assert await session.run(code, GENEROUS_S) == ProgramResult(printed, 0)
        assert (await session.run("1 / 0", GENEROUS_S)).printed.endswith("ZeroDivisionError: division by zero\n")
        ended = "import os; os.remove('kept'); print('y'); os._exit(3)"
        assert await session.run(ended, GENEROUS_S) == ProgramResult("y\n", 3)
        session = await sandbox.start(LIMITS)
        assert await session.run("import os; os._exit(0)", GENEROUS_S) == ProgramResult("", 1)
        session = await sandbox.start(LIMITS)
        assert await session.run("import time; time.sleep(600)", 1.0) == ProgramResult("", None)
        await session.close()

    within(named, act)


def below_the_stub() -> list[psutil.Process]:
    """The processes of the one container that is open, but its first."""
    return child_with("PROC").children(recursive=True)


@pytest.mark.parametrize("how", sorted(WAKING.keys() - {"and takes memory"}))
def test_a_session_that_runs_between_two_cells_is_ended_and_the_next_call_says_so(how: str, stub: Path):
    async def act(sandbox: ContainerSandbox) -> None:
        session = await sandbox.start(SandboxLimits(cpu_s=math.inf))
        await session.run("", GENEROUS_S)
        started = below_the_stub()
        assert started
        assert await session.run(WAKING[how], GENEROUS_S) == ProgramResult("", 0)
        # On a busy machine, the session may have been ended by now, and its container with it.
        with suppress(ValueError, psutil.NoSuchProcess):
            started += below_the_stub()
        await async_until(lambda: not living(started))
        assert await session.run("5", GENEROUS_S) == ProgramResult("", 137, reason=RAN_IN_PAUSE)

    within(("podman", "image"), act)


def test_a_session_whose_program_ends_between_two_cells_says_so_to_the_next(named: tuple[str, str]):
    async def act(sandbox: ContainerSandbox) -> None:
        session = await sandbox.start(SandboxLimits(cpu_s=math.inf))
        ending = f"{TRAPS}\nafter(0.5, signal.SIGKILL)"
        assert await session.run(ending, GENEROUS_S) == ProgramResult("", 0)
        if named[1] == "image":
            await async_until(lambda: not living(below_the_stub()))
        ran = await session.run("5; import time; time.sleep(600)", GENEROUS_S)
        # On a busy machine it may end just as it is paused.
        assert ran.reason in ("", RAN_IN_PAUSE)
        assert ran == ProgramResult(ran.printed, 137, reason=ran.reason)

    within(named, act)


def test_a_container_that_cannot_start_is_a_failure_of_the_sandbox(stub: Path):
    async def act(sandbox: ContainerSandbox) -> None:
        with pytest.raises(SandboxError, match="image not known"):
            await sandbox.run("print(1)", LIMITS)
        with pytest.raises(SandboxError, match="`podman pull missing` gets the image"):
            await sandbox.check()

    within(("podman", "missing"), act)


def test_a_host_without_the_program_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="there is no program docker on this host: install Docker Engine"):
        asyncio.run(ContainerSandbox("docker", "image").check())


def test_the_command_has_no_network_no_rights_and_limits(stub: Path):
    async def act(sandbox: ContainerSandbox) -> None:
        await sandbox.run("print(1)", SandboxLimits(8.0, 4.0, 1024))

    within(("podman", "image"), act)
    (called,) = map(json.loads, stub.read_text().splitlines())
    assert called[-7:-3] == ["image", "python3", "-I", "-c"]
    assert {
        "run",
        "--rm",
        "--pull=never",
        "--network=none",
        "--read-only",
        "--tmpfs=/tmp:rw,size=64m,mode=1777",
        "--memory=1024m",
        "--memory-swap=1024m",
        "--cpus=1",
        "--pids-limit=65",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--user=65534:65534",
        "--ulimit=cpu=4",
    } <= set(called)


def test_nothing_outlives_a_caller_that_is_killed(named: tuple[str, str]):
    program = f"""
import asyncio
from asyncrl.sandbox.containers import ContainerSandbox, SandboxLimits
async def main():
    session = await ContainerSandbox(*{named!r}, {MORE!r}).start(SandboxLimits())
    await session.run("x = 1", 600)
    print("ready", flush=True)
    await session.run("import time; time.sleep(600)", 600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "ready\n"
        started = psutil.Process(caller.pid).children(recursive=True)
        containers = _containers(named[0])
        caller.send_signal(signal.SIGKILL)
    if named[1] == "image":
        # The first process, and the program. The guard is no child of the caller.
        assert len(started) == 2
    else:
        assert containers
    until(lambda: not living(started) and not _containers(named[0]))


def _containers(program: str) -> list[str]:
    if not shutil.which(program) or program != REAL:
        return []
    found = subprocess.run([program, "ps", "-a", "--format={{.Names}}"], capture_output=True, text=True, check=True)
    return [name for name in found.stdout.split() if name.startswith("asyncrl-")]


@needs_containers
@pytest.mark.parametrize(
    ("program", "seen"),
    [
        ("import socket; socket.create_connection(('192.0.2.1', 80), 5)", "Network is unreachable"),
        ("open('/etc/x', 'w')", "Read-only file system"),
        ("import os; print(os.getuid(), os.listdir('/tmp'))", "65534 []"),
        ("open('/proc/1/fd/1', 'w').write('forged')", "Permission denied: '/proc/1/fd/1'"),
        ("print(len(open('/proc/self/environ').read()) > 0)", "True"),
        ("open('big', 'wb').write(bytes(4 << 20))", "File too large"),
        (
            "import os\ntry:\n    for i in range(99): open(f'{i}', 'wb').write(bytes(1 << 20))\n"
            "except OSError as error:\n    os.remove('0')\n    print(error)",
            "No space left",
        ),
    ],
)
def test_what_a_program_in_a_real_container_cannot_do(program: str, seen: str):
    async def act(sandbox: ContainerSandbox) -> None:
        assert seen in (await sandbox.run(program, LIMITS)).printed

    within((REAL, IMAGE), act)
