"""A server that an actor starts: restarted, ended with its actor, and explained if it does not start."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.engine.sglang.inside import FOLDER
from asyncrl.engine.sglang.launch import MOST_SILENCES, SILENCES, LaunchedServer, server_command
from asyncrl.errors import ConfigError, EngineError
from asyncrl.machine.ports import free_ports
from tests.helpers import GENEROUS_S, async_until, has_ended, until, whole_lines

pytestmark = pytest.mark.slow

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def launched(tmp_path: Path, code: str) -> LaunchedServer:
    port = free_ports(1)
    command = [sys.executable, "-c", code, str(port)]
    return LaunchedServer(f"http://127.0.0.1:{port}", command, tmp_path / "server.log", {}, GENEROUS_S, 1)


async def test_a_server_that_dies_is_started_again_and_none_is_left_in_the_end(tmp_path: Path) -> None:
    server = launched(tmp_path, SERVER)
    keeper = asyncio.create_task(server.keep())
    await async_until(lambda: server.starts == 1 and server.answering)
    assert server.process is not None
    server.process.kill()
    await async_until(lambda: server.starts == 2 and server.answering)
    pid = server.process.pid
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    assert has_ended(pid)


def answers_after_starts(server: LaunchedServer, starts: int) -> bool:
    return server.starts == starts and server.answering


async def test_a_server_that_joined_and_is_silent_several_times_in_a_row_is_killed_and_started_again(
    tmp_path: Path,
) -> None:
    server = launched(tmp_path, SERVER)
    keeper = asyncio.create_task(server.keep())
    for hang in range(2):
        await async_until(partial(answers_after_starts, server, hang + 1))
        process = server.process
        assert process is not None
        for _ in range(MOST_SILENCES):
            server.heard(False)
        assert server.hangs == hang, "its start may take long"
        server.heard(True)
        process.send_signal(signal.SIGSTOP)
        for number in range(SILENCES << hang):
            assert (server.hangs, number) == (hang, number)
            server.heard(False)
        assert server.hangs == hang + 1
        await async_until(lambda ended=process: ended.poll() == -signal.SIGKILL)
    await async_until(partial(answers_after_starts, server, 3))
    server.heard(True)
    for _ in range(SILENCES):
        server.heard(False)
        server.heard(True)
    assert server.hangs == 2, "they were not in a row"
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)


def test_the_number_of_silences_after_which_a_server_is_killed_has_a_limit(tmp_path: Path) -> None:
    server = launched(tmp_path, SERVER)
    for hang in range(6):
        server.heard(True)
        silences = 0
        while server.hangs == hang:
            server.heard(False)
            silences += 1
        assert silences == min(3 * 2**hang, 24)


@pytest.mark.parametrize(
    ("command", "start_s", "message"),
    [
        ([sys.executable, "-c", "raise SystemExit('no memory left on the moon')"], GENEROUS_S, "no memory left"),
        (["/bin/sh", "-c", "echo thinking; exec sleep 600"], 4.0, "thinking"),
    ],
)
async def test_a_server_that_does_not_start_or_never_answers_is_explained_by_its_last_lines(
    tmp_path: Path, command: list[str], start_s: float, message: str
) -> None:
    server = LaunchedServer(f"http://127.0.0.1:{free_ports(1)}", command, tmp_path / "server.log", {}, start_s, 1)
    with pytest.raises(ConfigError, match=rf"(?s)does not start.*{message}.*engine.python"):
        await server.keep()


async def test_a_server_that_is_killed_before_it_answers_is_started_again_once(tmp_path: Path) -> None:
    dies = "import os; os.kill(os.getpid(), 9)"
    once = tmp_path / "once"
    server = launched(
        tmp_path,
        f"import pathlib; once = pathlib.Path({str(once)!r})\nif not once.exists(): once.touch(); {dies}\n{SERVER}",
    )
    keeper = asyncio.create_task(server.keep())
    await async_until(lambda: server.answering or keeper.done())
    assert server.answering
    assert server.starts == 2
    keeper.cancel()
    await asyncio.gather(keeper, return_exceptions=True)
    never = launched(tmp_path, dies)
    with pytest.raises(ConfigError, match="does not start"):
        await never.keep()
    assert never.starts == 2


async def test_a_server_counts_as_running_until_its_last_process_has_ended(tmp_path: Path) -> None:
    """Another process that shares its GPUs may use them after that."""
    stubborn = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
    )
    command, log = [sys.executable, "-c", stubborn], tmp_path / "server.log"
    server = LaunchedServer(f"http://127.0.0.1:{free_ports(1)}", command, log, {}, GENEROUS_S, 1)
    keeper = asyncio.create_task(server.keep())
    await async_until(lambda: whole_lines(log))
    keeper.cancel()
    await async_until(lambda: not server.running)
    assert has_ended(int(log.read_text().split()[0]))
    await asyncio.gather(keeper, return_exceptions=True)


async def test_a_python_that_is_not_there_is_named(tmp_path: Path) -> None:
    server = LaunchedServer("http://127.0.0.1:1", ["/nowhere/python"], tmp_path / "server.log", {}, 1.0, 1)
    with pytest.raises(ConfigError, match=r"engine\.python=/nowhere/python"):
        await server.keep()


async def test_a_server_that_ran_and_does_not_start_any_more_ends_the_actor(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    server = launched(tmp_path, f"import os\nif os.path.exists({str(broken)!r}): raise SystemExit('gone')\n{SERVER}")
    keeper = asyncio.create_task(server.keep())
    await async_until(lambda: server.answering)
    broken.touch()
    assert server.process is not None
    server.process.kill()
    with pytest.raises(EngineError, match="gone"):
        await keeper
    assert server.starts == 3


@pytest.mark.heavy
def test_a_server_ends_with_all_its_processes_when_its_actor_is_killed(tmp_path: Path) -> None:
    """Also where they have not yet asked to."""
    inner = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}]); {inner}"
    code = f"""
import asyncio, sys
from pathlib import Path
from asyncrl.engine.sglang.launch import LaunchedServer
command = [sys.executable, "-c", {outer!r}]
server = LaunchedServer("http://127.0.0.1:1", command, Path({str(tmp_path)!r}, "server.log"), {{}}, 60.0, 1)
asyncio.run(server.keep())
"""
    actor = subprocess.Popen([sys.executable, "-c", code])
    log = tmp_path / "server.log"
    pids = until(lambda: log.exists() and len(log.read_text().split()) == 2 and log.read_text().split())
    actor.send_signal(signal.SIGKILL)
    actor.wait()
    until(lambda: all(has_ended(int(pid)) for pid in pids))


def test_the_command_line_has_what_was_configured() -> None:
    config = TrainConfig(model=ModelConfig(path="some/model", trust_remote_code=True))
    config.engine.python = "/opt/python"
    server = config.engine.server
    server.tp_size, server.memory, server.arguments = 2, 0.7, ["--device", "cpu"]
    text = " ".join(server_command(config.engine, config.model, 31000, 1))
    assert text.startswith("/opt/python -m sglang.launch_server --model-path some/model")
    for part in ("--port 31000", "--tp-size 2", "--base-gpu-id 2", "--mem-fraction-static 0.7", "--trust-remote-code"):
        assert part in text
    assert text.endswith("--device cpu")
    server.shared = [0]
    assert "--mem-fraction-static 0.7" in " ".join(server_command(config.engine, config.model, 31000, 0))
    assert "--mem-fraction-static" not in server_command(config.engine, config.model, 31000, 1), "its GPU is its own"


@pytest.mark.parametrize("given", [{}, {"PYTHONPATH": "/my/packages"}])
async def test_a_server_finds_the_loader_in_addition_to_the_users_own_packages(
    tmp_path: Path, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    command = ["/bin/sh", "-c", "echo PYTHONPATH is $PYTHONPATH."]
    log = tmp_path / "server.log"
    with pytest.raises(ConfigError):
        await LaunchedServer(f"http://127.0.0.1:{free_ports(1)}", command, log, given, GENEROUS_S, 1).keep()
    assert f"PYTHONPATH is {FOLDER}:{given.get('PYTHONPATH', '/inherited')}." in log.read_text()


def test_servers_that_share_a_gpu_have_its_number_and_no_share_of_what_is_free() -> None:
    config = TrainConfig(model=ModelConfig(path="some/model"))
    server = config.engine.server
    server.per_gpu, server.memory = 2, 0.7
    commands = [server_command(config.engine, config.model, 31000, index) for index in range(4)]
    assert [command[command.index("--base-gpu-id") + 1] for command in commands] == ["0", "0", "1", "1"]
    assert not any("--mem-fraction-static" in command for command in commands)


def test_what_fits_the_run_comes_before_the_users_own_arguments() -> None:
    config = TrainConfig(model=ModelConfig(path="some/model"))
    config.engine.server.arguments = ["--attention-backend", "fa3"]
    command = server_command(config.engine, config.model, 31000, 0, fitting=["--max-running-requests", "16"])
    assert command[-4:] == ["--max-running-requests", "16", "--attention-backend", "fa3"]
