"""The Python tool, with real processes."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl import sandbox
from asyncrl.actor.tools.python_sandbox import PythonSandbox
from tests.helpers import GENEROUS_S


def answer(code: str, **limits: Any) -> str:
    async def main() -> str:
        tool = PythonSandbox("t1")
        await tool.create(**limits)
        return await tool.execute({"code": code})

    return asyncio.run(main())


def test_what_a_program_prints_is_the_answer():
    assert answer("print(5 * 3)\nprint('é解')") == "15\né解"


def test_a_program_that_prints_nothing_is_told_so():
    assert answer("5 * 3") == "(no output; print what you want to see)"


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("oops(", "SyntaxError"),
        ("import sys; sys.exit(3)", "Error: the program ended with status 3."),
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(4 << 20))", "File too large"),
        ("files = [open('/dev/null') for _ in range(100)]", "Too many open files"),
        ("import os; os.abort()", "Error: the program ended with status 1"),
        ("input()", "EOFError"),
        ("print('\\ud800')", "UnicodeEncodeError"),
    ],
)
def test_a_programs_own_failure_is_an_answer(code: str, seen: str):
    assert seen in answer(code)


def test_endless_output_is_capped():
    assert len(answer("while True: print('x' * 1000)")) < (1 << 20) + 1000


def test_time_is_limited():
    assert "stopped, after 1 s of CPU time" in answer("while True: pass", cpu_s=1)
    assert answer("print('a', flush=True)\nimport time; time.sleep(60)", wall_s=2) == "a\nError: stopped after 2 s."


def test_nothing_of_the_actor_is_in_reach(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    seen = answer("import os; print(dict(os.environ), os.getcwd(), os.listdir('.'))")
    assert "hidden" not in seen
    assert os.getcwd() not in seen  # noqa: PTH109
    assert seen.endswith("[]")


def test_each_call_has_a_folder_of_its_own_that_goes_away():
    folder = answer("import os; open('a', 'w').write('x'); os.mkdir('b', 0); print(os.getcwd())")
    assert folder.startswith(tempfile.gettempdir())
    assert not Path(folder).exists()


def alive(mark: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if mark in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid()
    ]


SLEEPER = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)', {mark!r}])\n"


@pytest.fixture(params=["namespaces", "plain"])
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what the system offers, and as on a system without namespaces."""
    if request.param == "plain":
        flags = "0x10000000, 0x20000000, 0x40000000"
        script = sandbox.CHILD.read_text()
        assert flags in script
        (tmp_path / "child.py").write_text(script.replace(flags, "0, 0, 0"))
        monkeypatch.setattr(sandbox, "CHILD", tmp_path / "child.py")


@pytest.mark.usefixtures("isolation")
def test_what_a_program_leaves_running_is_killed():
    mark = f"left-running-{os.getpid()}"
    assert answer(SLEEPER.format(mark=mark) + "print('gone')") == "gone"
    assert_gone(mark)


@pytest.mark.usefixtures("isolation")
def test_a_cancelled_call_leaves_no_process():
    mark = f"cancelled-{os.getpid()}"

    async def main() -> None:
        tool = PythonSandbox("t1")
        await tool.create()
        code = SLEEPER.format(mark=mark) + "import time; time.sleep(99)"
        call = asyncio.create_task(tool.execute({"code": code}))
        async with asyncio.timeout(GENEROUS_S):
            while not alive(mark):
                await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    assert_gone(mark)


def assert_gone(mark: str) -> None:
    _, left = psutil.wait_procs(alive(mark), timeout=GENEROUS_S)
    assert left == []


def namespaces_work() -> bool:
    return answer("import os; print(os.getpid())") == "1"


def test_the_network_and_other_processes_are_out_of_reach_where_the_system_allows():
    if not namespaces_work():
        pytest.skip("this system grants no namespaces")
    assert "Network is unreachable" in answer("import socket; socket.create_connection(('192.0.2.1', 80), 1)")
    assert "ProcessLookupError" in answer(f"import os; os.kill({os.getpid()}, 0)")
