"""The Python tool, with real processes."""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from asyncrl.config.schema import ActorConfig
from asyncrl.config.schema.tools import SandboxConfig
from asyncrl.errors import ConfigError
from asyncrl.sandbox.sandbox import SandboxError
from asyncrl.tools.python_sandbox import PythonSandbox
from asyncrl.tools.registry import tool_classes
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import ToolCall
from tests.episode.fakes import make_ticket
from tests.helpers import GENEROUS_S
from tests.network.web import web_server

pytestmark = pytest.mark.slow


def answer(code: str, **limits: Any) -> str:
    async def main() -> str:
        tool = PythonSandbox("t1")
        await tool.create(**{"wall_s": GENEROUS_S, "cpu_s": GENEROUS_S, **limits})
        return await tool.execute({"code": code})

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("print(5 * 3)\nprint('é解')", "15\né解"),
        ("5 * 3", "(no output; print what you want to see)"),
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
def test_what_a_program_prints_and_its_own_failure_are_answers(code: str, seen: str):
    assert seen in answer(code)


def test_endless_output_is_capped():
    assert len(answer("for _ in range(5000): print('x' * 1000)")) < (1 << 20) + 1000


def test_limits_that_a_table_gives_as_floats_are_whole_and_malformed_ones_are_refused() -> None:
    assert answer("print(1)", memory_mb=1024.0) == "1"
    for name, limit in [("memory_mb", 0.5), ("memory_mb", "1024"), ("wall_s", math.nan), ("cpu_s", 0), ("cpu_s", True)]:
        with pytest.raises(ValueError, match=f"{name} is .*; it must be a (whole )?number above 0"):
            answer("print(1)", **{name: limit})


def test_time_is_limited():
    assert "stopped because of more than 1 s of CPU time" in answer("while True: pass", cpu_s=1)
    for wall_s in (0.5, 2.0, 8.0, 32.0):
        # On a busy machine a program may not begin in a short time.
        with suppress(SandboxError):
            assert answer("import time; time.sleep(600)", wall_s=wall_s) == f"Error: stopped after {wall_s:g} s."
            break
    else:
        pytest.fail("no program began")


def test_nothing_of_the_actor_is_in_reach(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    seen = answer("import os; print(dict(os.environ), os.getcwd(), os.listdir('.'))")
    assert "hidden" not in seen
    assert os.getcwd() not in seen  # noqa: PTH109
    assert seen.endswith("[]")


def test_each_call_has_a_folder_of_its_own_that_goes_away():
    # The program sees its folder at a path at which the machine may have another one.
    file, folder = uuid.uuid4().hex, uuid.uuid4().hex
    program = f"import os; print(os.listdir()); open('{file}', 'w'); os.mkdir('{folder}', 0); print(os.getcwd())"
    first, second = answer(program), answer(program)
    assert first.startswith("[]\n")
    assert second.startswith("[]\n")
    here = Path(first.splitlines()[1])
    assert not (here / file).exists()
    assert not (here / folder).exists()


def test_calls_in_another_sandbox_have_their_own_limit_of_time_and_wait_for_each_other():
    running, most = 0, 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        ran = {"status": "Finished", "return_code": 0, "stdout": "5\n", "stderr": ""}
        return web.json_response({"status": "Success", "message": "", "run_result": ran})

    async def main() -> list[Any]:
        async with web_server(handler) as port:
            sandbox = SandboxConfig(kind="http", url=f"http://127.0.0.1:{port}", at_once=2)
            toolbox = Toolbox(tool_classes(ActorConfig(tools=["python"], sandbox=sandbox)), ToolLimits(0.01, 0))
            async with toolbox.open(make_ticket()) as tools:
                return list(await tools.answer([ToolCall("python", {"code": "print(5)"})] * 5))

    assert asyncio.run(main()) == ["5"] * 5
    assert most == 2


def test_a_sandbox_that_is_not_there_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for tool in ("python", "python_session"):
        with pytest.raises(
            ConfigError, match=r"actor\.sandbox: there is no program podman on this host: install podman"
        ):
            tool_classes(ActorConfig(tools=[tool], sandbox=SandboxConfig(kind="podman")))
    with pytest.raises(ConfigError, match="a server keeps no sessions"):
        tool_classes(
            ActorConfig(tools=["python_session"], sandbox=SandboxConfig(kind="http", url="http://127.0.0.1:1"))
        )
