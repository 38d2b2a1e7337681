"""Sessions with real processes: where the system grants namespaces, and where it does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from asyncrl.sandbox import sandbox
from asyncrl.sandbox.child.pausing import RAN_IN_PAUSE
from asyncrl.sandbox.sandbox import ProgramResult, SandboxError, SandboxLimits
from asyncrl.sandbox.session import Interpreter, SessionServer
from tests.helpers import GENEROUS_S, async_until, child_with, living, until
from tests.sandbox.waking import WAKING

pytestmark = pytest.mark.slow

LIMITS = SandboxLimits(memory_mb=300)
PROCESSES = {True: 3, False: 2}
"""The number of processes of a session, with namespaces and without: the launcher, the watcher and the program.

Without namespaces the launcher is the watcher.
"""


@pytest.fixture(
    params=[
        pytest.param(True, marks=pytest.mark.skipif(bool(sandbox.why_no_namespaces()), reason="no namespaces here")),
        False,
    ],
    ids=["namespaces", "plain"],
)
def either(request: pytest.FixtureRequest) -> bool:
    """True if sessions get namespaces."""
    return bool(request.param)


@asynccontextmanager
async def opened(namespaces: bool) -> AsyncIterator[Interpreter]:
    server = SessionServer()
    try:
        session = await server.start(LIMITS, namespaces)
        try:
            yield session
        finally:
            await session.close()
    finally:
        server.close()


def within(namespaces: bool, act: Callable[[Interpreter], Awaitable[None]]) -> None:
    async def main() -> None:
        async with opened(namespaces) as session:
            await act(session)

    asyncio.run(main())


def server_here() -> psutil.Process:
    """The process that starts this test's sessions."""
    return child_with("sandbox.child.server")


def alive(mark: str) -> list[psutil.Process]:
    """Processes other than this one that carry `mark` in their arguments."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if mark in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid()
    ]


def sleeper(mark: str) -> str:
    """A cell that starts a process which leaves the program's process group, and carries `mark`."""
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)", mark]
    return f"import subprocess; started = subprocess.Popen({command!r}, start_new_session=True)"


CELLS = {
    "the value of the last expression is shown": [
        ("x = 5\nx + 1", "6\n"),
        ("x; x", "5\n"),
        ("None", ""),
        ("_ + 1", "6\n"),
    ],
    "variables, imports and functions stay": [
        ("import math\ndef f(x):\n    return x + 1", ""),
        ("f(math.floor(1.5))", "2\n"),
    ],
    "files stay": [("open('a', 'w').write('hi')", "2\n"), ("open('a').read()", "'hi'\n")],
    "what is printed by itself and by its processes is in order": [
        ("import os\nprint(1)\nos.system('echo 2')\nprint(3)", "1\n2\n3\n"),
        ("print('é解')", "é解\n"),
    ],
    "a cell that ends Python only ends itself": [("y = 1\nimport sys; sys.exit(3)", "SystemExit: 3\n"), ("y", "1\n")],
    "a cell that puts its own streams in place of Python's": [
        ("import sys, io; sys.stdout = io.StringIO(); print(7)", ""),
        ("sys.stdout = sys.__stdout__; print(8)", "8\n"),
    ],
    "a cell that forks is answered once": [("import os\nif os.fork(): os.wait()", ""), ("1", "1\n")],
}


@pytest.mark.parametrize("what", CELLS)
def test_cells(what: str, either: bool):
    async def act(session: Interpreter) -> None:
        for code, printed in CELLS[what]:
            ran = await session.run(code, GENEROUS_S)
            assert ran.status == 0
            assert ran.printed.endswith(printed)
            assert printed or not ran.printed

    within(either, act)


def test_an_error_shows_the_lines_of_its_cells_and_nothing_of_the_session(either: bool):
    async def act(session: Interpreter) -> None:
        await session.run("def divide():\n    return 1 / 0", GENEROUS_S)
        ran = await session.run("divide()", GENEROUS_S)
        lines = [line.strip() for line in ran.printed.splitlines() if not set(line) <= set(" ^~")]
        assert lines == [
            "Traceback (most recent call last):",
            'File "<cell 2>", line 1, in <module>',
            "divide()",
            'File "<cell 1>", line 2, in divide',
            "return 1 / 0",
            "ZeroDivisionError: division by zero",
        ]
        assert (await session.run("oops(", GENEROUS_S)).printed.startswith('  File "<cell 3>", line 1\n')

    within(either, act)


ENDINGS = {
    "out of time": ("print('begun'); import time; time.sleep(600)", 3.0, None),
    "a crash": ("print('begun'); import os; os._exit(3)", GENEROUS_S, 3),
    "memory of its processes together": (
        "print('begun')\nimport os, time\nfor _ in range(6):\n"
        "    if not os.fork():\n        kept = b'x' * (100 << 20)\n        break\ntime.sleep(600)",
        GENEROUS_S,
        137,
    ),
    "something else than a reply": (
        "print('begun')\nimport glob, os, stat\nfor each in range(3, 20):\n"
        "    try:\n        if stat.S_ISSOCK(os.fstat(each).st_mode): os.write(each, b'{}')\n    except OSError: pass\n"
        "import time; time.sleep(600)",
        GENEROUS_S,
        1,
    ),
}


@pytest.mark.parametrize("what", ENDINGS)
def test_a_call_that_ends_the_session_tells_how_and_what_was_printed(what: str, either: bool):
    code, wall_s, status = ENDINGS[what]

    async def act(session: Interpreter) -> None:
        assert await session.run(code, wall_s) == ProgramResult("begun\n", status)
        assert not session.is_open

    within(either, act)


def test_endless_output_is_capped_and_the_next_cell_prints_again(either: bool):
    async def act(session: Interpreter) -> None:
        ran = await session.run("for _ in range(5000): print('x' * 1000)", GENEROUS_S)
        assert len(ran.printed) <= 1 << 20
        assert ran.printed.endswith("File too large\n")
        assert await session.run("print(1)", GENEROUS_S) == ProgramResult("1\n", 0)

    within(either, act)


def test_between_two_cells_all_processes_stand_still(either: bool):
    mark = f"still-{os.getpid()}-{either}"

    async def act(session: Interpreter) -> None:
        code = "import threading\ncount = 0\ndef work():\n    global count\n    while True: count += 1\n"
        await session.run(f"{code}threading.Thread(target=work, daemon=True).start()\n{sleeper(mark)}", GENEROUS_S)
        async with asyncio.timeout(GENEROUS_S):
            while {process.status() for process in alive(mark)} != {psutil.STATUS_STOPPED}:
                await asyncio.sleep(0.01)
        ran = await session.run("before = count\nwhile count == before: pass\nstarted.poll()", GENEROUS_S)
        assert ran == ProgramResult("", 0)

    within(either, act)
    assert alive(mark) == []


REASONS = {"and takes memory": [RAN_IN_PAUSE, ""]}
"""The possible reasons for the end of a session, by the way in which it wakes up, if there are several.

A session may exceed its memory first, if a busy machine has not yet stopped it.
"""


@pytest.mark.parametrize("how", WAKING)
def test_a_session_that_runs_between_two_cells_is_ended_and_the_next_call_says_so(how: str, either: bool):
    async def act(session: Interpreter) -> None:
        await session.run("", GENEROUS_S)
        server = server_here()
        started = server.children(recursive=True)
        assert len(started) >= PROCESSES[either]
        assert await session.run(WAKING[how], GENEROUS_S) == ProgramResult("", 0)
        # On a busy machine, the session may have been ended by now.
        started += server.children(recursive=True)
        await async_until(lambda: not session.is_open)
        await async_until(lambda: not living(started))
        ended = await session.run("5", GENEROUS_S)
        assert ended in [ProgramResult("", 137, reason=reason) for reason in REASONS.get(how, [RAN_IN_PAUSE])]

    within(either, act)


def test_an_honest_session_of_many_busy_processes_goes_on_after_its_pauses(either: bool):
    cell = """
import os, subprocess, threading
def work():
    while True:
        subprocess.run(["/bin/true"])
for _ in range(20):
    if os.fork() == 0:
        while True:
            pass
threading.Thread(target=work, daemon=True).start()
"""

    async def act(session: Interpreter) -> None:
        await session.run(cell, GENEROUS_S)
        server = server_here()
        (watcher,) = server.children()
        for _ in range(PROCESSES[either] - 2):
            (watcher,) = watcher.children()
        assert len(watcher.children(recursive=True)) > 20
        for _ in range(3):
            before = watcher.num_ctx_switches().voluntary
            # It has looked so often.
            await async_until(lambda before=before: watcher.num_ctx_switches().voluntary >= before + 8)
            assert await session.run("5", GENEROUS_S) == ProgramResult("5\n", 0)

    within(either, act)


def test_nothing_outlives_a_session_that_is_closed_in_a_cell(either: bool):
    mark = f"closed-{os.getpid()}-{either}"

    async def act(session: Interpreter) -> None:
        call = asyncio.create_task(session.run(f"{sleeper(mark)}\nimport time; time.sleep(600)", GENEROUS_S))
        async with asyncio.timeout(GENEROUS_S):
            while not alive(mark):
                await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert alive(mark) == []

    within(either, act)


def test_nothing_outlives_a_caller_that_is_killed(either: bool, tmp_path: Path):
    mark = f"orphan-{os.getpid()}-{either}"
    program = f"""
import asyncio, sys
from asyncrl.sandbox.session import SessionServer, SandboxLimits
async def main():
    server = SessionServer()
    session = await server.start(SandboxLimits(), {either})
    print(await session.run(sys.stdin.read(), 600), flush=True)
    print(await session.run("while True: pass", 600), flush=True)
asyncio.run(main())
"""
    command, environment = [sys.executable, "-c", program], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as caller:
        assert caller.stdin is not None
        assert caller.stdout is not None
        caller.stdin.write(f"{sleeper(mark)}; open('written', 'w').close()")
        caller.stdin.close()
        assert caller.stdout.readline() == f"{ProgramResult('', 0)}\n"
        # Its arguments show a while after its start.
        (sleeping,) = until(lambda: alive(mark))
        (server,) = psutil.Process(caller.pid).children()
        of_session = server.children(recursive=True)
        assert len(of_session) == PROCESSES[either] + 1
        assert sleeping in of_session
        assert len(list(tmp_path.glob("*/written"))) == (not either)
        caller.send_signal(signal.SIGKILL)
    until(lambda: not living([server, *of_session]))
    assert list(tmp_path.iterdir()) == []


def test_sessions_see_nothing_of_each_other(either: bool):
    async def main() -> None:
        server = SessionServer()
        try:
            one, other = [await server.start(LIMITS, either) for _ in range(2)]
            await one.run("kept = 1; open('file', 'w').close()", GENEROUS_S)
            ran = await other.run("import os\n'kept' in globals(), os.listdir()", GENEROUS_S)
            assert ran == ProgramResult("(False, [])\n", 0)
            for session in (one, other):
                await session.close()
        finally:
            server.close()

    asyncio.run(main())


@pytest.mark.skipif(bool(sandbox.why_no_namespaces()), reason="no namespaces here")
def test_a_session_in_namespaces_reaches_neither_network_nor_files_nor_other_processes():
    tries = {
        "import socket; socket.create_connection(('127.0.0.1', 22), 5)": "Network is unreachable",
        f"open({__file__!r})": "No such file",
        f"import os; os.kill({os.getpid()}, 0)": "ProcessLookupError",
        "os.kill(1, 9)": "Operation not permitted",
        "open('/usr/file', 'w')": "Read-only file system",
        "import ctypes; ctypes.CDLL(None).unshare(0x10000000)": "-1\n",
        "socket.socket(40, socket.SOCK_STREAM)": "Operation not permitted",
        "for i in range(99): open(f'{i}', 'wb').write(bytes(1 << 20))": "No space left",
    }

    async def act(session: Interpreter) -> None:
        for code, seen in tries.items():
            assert seen in (await session.run(code, GENEROUS_S)).printed

    within(True, act)


def test_the_process_that_starts_sessions_may_be_killed(either: bool):
    async def main() -> None:
        server = SessionServer()
        try:
            first = await server.start(LIMITS, either)
            ours = {each.pid for each in psutil.Process().children()}
            (process,) = [each for each in alive("sandbox.child.server") if each.pid in ours]
            process.kill()
            process.wait()
            second = await server.start(LIMITS, either)
            for session in (first, second):
                assert await session.run("5", GENEROUS_S) == ProgramResult("5\n", 0)
                await session.close()
        finally:
            server.close()

    asyncio.run(main())


def test_a_session_that_this_machine_has_ended_is_no_answer():
    if sandbox.why_no_namespaces():
        pytest.skip("a program without namespaces may do so itself")

    async def act(session: Interpreter) -> None:
        for process in psutil.Process().children(recursive=True):
            # One may end with another.
            with suppress(psutil.Error):
                if process.ppid() != os.getpid():
                    process.kill()
        with pytest.raises(SandboxError):
            await session.run("5", GENEROUS_S)

    within(True, act)
