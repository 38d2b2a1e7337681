"""Tools of real servers in processes of their own: sessions, failures, bounds, and what is listed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.actor.from_config import open_toolbox
from asyncrl.config.schema import ActorConfig
from asyncrl.errors import ConfigError, ToolError
from asyncrl.machine import guard
from asyncrl.machine.ports import free_ports
from asyncrl.tools.offered import Offer
from asyncrl.tools.toolbox import OpenTools, Toolbox
from asyncrl.types import ToolCall
from tests.episode.fakes import make_ticket
from tests.helpers import async_until, has_ended, until

pytestmark = pytest.mark.slow

COUNTER, RAW = (str(Path(__file__).parent / f"{name}_server.py") for name in ("counter", "raw"))


def raw(act: object, **keys: Any) -> dict[str, Any]:
    """A server that speaks by hand."""
    return {"command": sys.executable, "args": [RAW, str(act)], **keys}


def actor(_tools: list[str] | None = None, **servers: Any) -> ActorConfig:
    return ActorConfig(tools=_tools or [], mcp_servers=servers, tool_retries=1, max_tool_chars=100)


def run(config: ActorConfig, act: Callable[[Toolbox], Awaitable[Any]]) -> tuple[Any, dict[str, float]]:
    """Open the tools and call `act`. Returns its result, and the counters."""

    async def main() -> Any:
        toolbox = open_toolbox(config)
        assert isinstance(toolbox, Toolbox)
        try:
            return await act(toolbox), dict(toolbox.counters())
        finally:
            await toolbox.close()

    found: tuple[Any, dict[str, float]] = asyncio.run(main())
    return found


def episode(*names: str) -> Callable[[Toolbox], Awaitable[list[str]]]:
    """One episode, which calls the tools one after another. The text of a failure ends it."""

    async def act(toolbox: Toolbox) -> list[str]:
        shown = []
        async with toolbox.open(make_ticket()) as tools:
            for name in names:
                try:
                    shown.append(await call(tools, name))
                except ToolError as error:
                    return [*shown, str(error)]
        return shown

    return act


async def call(tools: OpenTools, name: str, **arguments: Any) -> str:
    (answer,) = await tools.answer([ToolCall(name, arguments)])
    return answer


def test_a_server_made_with_the_package_answers_in_all_its_ways():
    async def act(toolbox: Toolbox) -> list[str]:
        async with toolbox.open(make_ticket()) as tools:
            return [
                await call(tools, "add", number=2),
                await call(tools, "add", number=3),
                await call(tools, "describe"),
                await call(tools, "fail", why="because"),
                await call(tools, "picture"),
                await call(tools, "long", characters=9_000_000),
                await call(tools, "add", number="many"),
            ]

    server = {"command": sys.executable, "args": [COUNTER], "timeout_s": 60}
    shown, counts = run(actor(s=server), act)
    assert shown[:2] == ["2", "5"]
    assert json.loads(shown[2]) == {"count": 5}
    assert shown[3].startswith("Error executing tool fail")
    assert shown[4] == "here it is\n[an image (image/png) is not shown]"
    assert shown[5] == "Error: the result is larger than 8 MiB; ask for less."
    assert shown[6].startswith("Error executing tool add")
    assert (counts["mcp_started"], counts["mcp_errors"], counts["mcp_unshown"]) == (1, 3, 1)
    assert (counts["mcp_lost"], counts["mcp_sessions"], counts["tool_failures"]) == (0, 0, 0)


class UrlServer:
    """A server that runs at `url`, and is started again where it has ended."""

    def __init__(self) -> None:
        self.port = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.starts = 0
        self._wanted = True
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def restart(self) -> None:
        """Kill it, and return when it answers again."""
        before = self.starts
        self.kill()
        until(lambda: self.starts > before and self.is_open(), 120)

    def is_open(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._wanted = False
        self.kill()
        self._keeper.join()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _keep(self) -> None:
        while self._wanted:
            command = [sys.executable, COUNTER, str(self.port)]
            self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            self.starts += 1
            self._process.wait()


@pytest.fixture
def server() -> Iterator[UrlServer]:
    with closing(UrlServer()) as found:
        until(found.is_open, 120)
        yield found


def test_a_server_at_a_url_has_a_session_for_each_episode_and_may_be_started_again(server: UrlServer):
    async def act(toolbox: Toolbox) -> list[str]:
        async with toolbox.open(make_ticket()) as tools:
            shown = [
                await call(tools, "who"),
                await call(tools, "who"),
                await call(tools, "long", characters=9_000_000),
            ]
            with pytest.raises(ToolError, match="the session with MCP server s was lost"):
                await call(tools, "die")
        await async_until(server.is_open, 120)
        async with toolbox.open(make_ticket()) as tools:
            return [*shown, await call(tools, "who")]

    shown, counts = run(actor(s={"url": server.url, "headers": {"X-Key": "abc"}, "timeout_s": 60}), act)
    assert shown[2] == "Error: the result is larger than 8 MiB; ask for less."
    assert shown[0] == shown[1] != shown[3]
    assert all(each.startswith("abc ") for each in (shown[0], shown[3]))
    assert (counts["mcp_started"], counts["mcp_states_lost"], counts["mcp_sessions"]) == (2, 1, 0)


def test_a_shared_server_at_a_url_answers_many_calls_at_once_in_one_session(server: UrlServer):
    async def act(toolbox: Toolbox) -> list[str]:
        async with toolbox.open(make_ticket()) as tools, toolbox.open(make_ticket()) as others:
            calls = (call(each, "add", number=1) for each in [tools, others] * 20)
            return list(await asyncio.gather(*calls))

    shown, counts = run(actor(s={"url": server.url, "shared": True, "timeout_s": 60}), act)
    assert sorted(map(int, shown)) == list(range(1, 41))
    assert counts["mcp_started"] == 1


def test_a_shared_session_that_a_server_at_a_url_has_forgotten_is_opened_again(server: UrlServer):
    async def act(toolbox: Toolbox) -> list[str]:
        async with toolbox.open(make_ticket()) as tools:
            first = await call(tools, "who")
            await asyncio.to_thread(server.restart)
            return [first, await call(tools, "who")]

    (first, second), counts = run(actor(s={"url": server.url, "shared": True, "timeout_s": 60}), act)
    assert first != second
    assert (counts["mcp_started"], counts["mcp_lost"], counts["tool_failures"]) == (2, 1, 1)


def test_each_episode_has_a_process_whose_group_ends_with_it():
    async def act(toolbox: Toolbox) -> tuple[list[str], list[str]]:
        async with (
            toolbox.open(make_ticket()) as one,
            toolbox.open(make_ticket()) as other,
            toolbox.open(make_ticket()),
        ):
            return [await call(one, "act"), await call(one, "act")], [await call(other, "act")]

    (one, other), counts = run(actor(s=raw("count")), act)
    assert [shown.split()[0] for shown in (*one, *other)] == ["1", "2", "1"]
    server, child = map(int, one[0].split()[1:])
    assert one[1].split()[1] == str(server) != other[0].split()[1]
    assert until(lambda: has_ended(server) and has_ended(child))
    assert counts["mcp_started"] == 2, "the third episode called nothing"


def test_a_shared_server_has_one_process_for_all_episodes():
    async def act(toolbox: Toolbox) -> list[str]:
        first = await episode("act")(toolbox)
        return first + await episode("act")(toolbox)

    shown, counts = run(actor(s=raw("count", shared=True)), act)
    assert [each.split()[0] for each in shown] == ["1", "2"]
    assert (counts["mcp_started"], counts["mcp_sessions"]) == (1, 1)


def test_a_server_has_only_the_variables_that_it_is_given(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET", "s3")
    monkeypatch.setenv("OTHER", "hidden")
    config = actor(s=raw("variables", env={"TOKEN": "a-$SECRET"}))
    config.max_tool_chars = 10_000
    (shown,), _ = run(config, episode("act"))
    variables = json.loads(shown)
    assert (variables["TOKEN"], variables["PATH"]) == ("a-s3", os.environ["PATH"])
    assert variables.keys() <= {"TOKEN", "PATH", "LC_CTYPE", guard.VARIABLE}


@pytest.mark.parametrize(
    ("act", "shown", "counted"),
    [
        ("flood", "Error: the result is larger than 8 MiB; ask for less.", {"mcp_lost": 0, "tool_failures": 0}),
        ("noise", "done", {"mcp_lost": 0, "tool_failures": 0}),
        ("rubbish", r"failed 2 times, .*it wrote 10000 lines that answer no request", {"mcp_lost": 2}),
        ("stray", r"failed 2 times, .*it wrote 10000 lines that answer no request", {"mcp_lost": 2}),
        ("line", r"failed 2 times, .*it wrote a line of more than 16 MiB", {"mcp_lost": 2}),
        ("half", r"half \?", {"mcp_lost": 0, "tool_failures": 0}),
        ("latin", "caf\ufffd", {"mcp_lost": 0, "tool_failures": 0}),
        ("deep", r"failed 2 times, .*the result is not a message of MCP", {"mcp_lost": 0, "tool_failures": 2}),
        ("hang", r"failed 2 times, .*it did not answer within 0\.5 s", {"mcp_lost": 2, "mcp_started": 2}),
        ("error", r"failed 2 times, .*the error -32000: no disk", {"mcp_lost": 0, "mcp_started": 1}),
        ("wrong", r"failed 2 times, .*its result is not valid MCP", {"mcp_lost": 0, "tool_failures": 2}),
    ],
)
def test_a_server_that_goes_wrong_fails_its_episode_and_nothing_else(
    act: str, shown: str, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("asyncrl.tools.mcp.stdio.MAX_LINE_BYTES", (1 if act == "line" else 64) * (16 << 20))
    limit_s = 0.5 if act == "hang" else 60
    (answer,), counts = run(actor(s=raw(act, timeout_s=limit_s)), episode("act"))
    assert re.search(shown, answer)
    assert {name: counts[name] for name in counted} == counted
    assert counts["mcp_sessions"] == 0


def test_a_call_is_tried_again_with_a_new_process_and_the_log_has_what_the_old_one_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = actor(s=raw(tmp_path / "starts"))
    config.tool_retries = 2
    (shown,), counts = run(config, episode("act"))
    assert shown == "done"
    assert (counts["mcp_started"], counts["mcp_lost"], counts["tool_failures"]) == (3, 2, 2)
    assert "the program ended with status 7; its standard error ends with: out of luck" in caplog.text


def test_an_episode_whose_state_is_lost_fails_at_once():
    shown, counts = run(actor(s=raw("once")), episode("act", "act"))
    assert shown[0] == "done"
    assert "the session with MCP server s was lost" in shown[1]
    assert (counts["mcp_started"], counts["mcp_states_lost"], counts["tool_failures"]) == (1, 1, 1)


def test_a_shared_server_that_dies_now_and_then_is_started_again():
    shown, counts = run(actor(s=raw("once", shared=True)), episode("act", "act", "act"))
    assert shown == ["done"] * 3
    assert (counts["mcp_started"], counts["mcp_states_lost"]) == (3, 0)


def test_episodes_wait_for_a_free_session_and_never_for_each_other():
    """Each of two servers has one session, and the tasks list the servers' tools in both orders."""
    config = actor(a=raw("once", prefix="a_", sessions=1), b=raw("once", prefix="b_", sessions=1))
    schemas = Offer(config).functions(make_ticket().task)

    async def play(toolbox: Toolbox, names: list[str]) -> None:
        task = make_ticket(tools=[dict(schemas[name]) for name in names])
        async with toolbox.open(task) as tools:
            for name in names:
                await call(tools, name)

    async def act(toolbox: Toolbox) -> int:
        orders = [["a_act", "b_act"], ["b_act", "a_act"]] * 3
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, int(toolbox.counters()["mcp_sessions"]))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(play(toolbox, order) for order in orders))
        watching.cancel()
        return most

    most, counts = run(config, act)
    assert most == 2
    assert counts["mcp_started"] == 12


def test_an_episode_that_is_cancelled_leaves_no_process():
    async def act(toolbox: Toolbox) -> int:
        pids: list[int] = []

        async def play() -> None:
            async with toolbox.open(make_ticket()) as tools:
                pids.append(int((await call(tools, "act")).split()[1]))
                await asyncio.Event().wait()

        task = asyncio.create_task(play())
        await async_until(lambda: pids)
        task.cancel()
        await asyncio.wait({task})
        return pids[0]

    pid, counts = run(actor(s=raw("count")), act)
    assert until(lambda: has_ended(pid))
    assert counts["mcp_sessions"] == 0


def test_servers_and_their_children_end_with_an_actor_that_is_killed(tmp_path: Path):
    pids = tmp_path / "pids"
    program = f"""
import asyncio, pathlib
from asyncrl.tools.mcp.tools import mcp_classes
from asyncrl.config.schema import ActorConfig
async def main():
    service = mcp_classes(ActorConfig(mcp_servers={{"s": {raw("count")!r}}}))["act"].service
    async with service.session() as session:
        pathlib.Path({str(pids)!r}).write_text(await session.call("act", {{}}) + "!")
        await asyncio.Event().wait()
asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(lambda: pids.exists() and pids.read_text().endswith("!"), 120)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _, server, child = pids.read_text().rstrip("!").split()
    assert until(lambda: has_ended(int(server)) and has_ended(int(child)))


@pytest.mark.parametrize(
    ("servers", "reason"),
    [
        (
            {"s": raw("many")},
            r"actor\.mcp_servers\.s lists 1000 tools; choose at most 128 .* tools=\[act0, act1, act2\]",
        ),
        ({"s": raw("endless")}, "its list of tools is too long"),
        ({"s": raw("ok", tools=["dig"])}, r"actor\.mcp_servers\.s\.tools: the server does not list dig; it has act"),
        ({"s": raw("ok", prefix="p" * 70)}, "more than 64 letters"),
        ({"s": raw("alike")}, r"has two tools that become a_b \(a\.b, a/b\); choose its tools"),
        ({"a": raw("ok"), "b": raw("ok")}, r"servers\.b offers act as actor\.mcp_servers\.a does; set its prefix"),
        ({"s": {"command": "no-such-program"}}, r"does not list its tools: .*No such file.*\(no-such-program\)"),
        ({"s": {"command": "sh", "args": ["-c", "echo no licence >&2; exit 4"]}}, "ended with status 4;.*no licence"),
        ({"s": {"command": "sleep", "args": ["100"], "start_s": 0.3}}, r"it did not start within start_s=0\.3"),
        ({"s": raw("ok", env={"A": "$NO_SUCH_VARIABLE"})}, "no variable NO_SUCH_VARIABLE"),
        ({"s": {"url": "http://127.0.0.1:9/mcp"}}, r"ConnectError.*\(http://127\.0\.0\.1:9/mcp\)"),
        ({"_tools": ["calculator"], "s": raw("calculator")}, "both offer calculator; set the server's prefix"),
    ],
)
def test_servers_that_cannot_be_used_are_refused_before_the_run(servers: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        open_toolbox(actor(**servers))


def test_tools_are_chosen_by_name_and_get_names_that_functions_can_have():
    functions = Offer(actor(a=raw("many", tools=["act7", "act9"]), b=raw("dotted", prefix="my_"))).always
    assert list(functions) == ["act7", "act9", "my_files_act_now"]
    assert functions["act7"]["parameters"] == {"type": "object", "properties": {}}
