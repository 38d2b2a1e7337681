"""A server of the page in this process, and runs for it to show."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import ClientSession, CookieJar

from asyncrl.dashboard.__main__ import page_server
from asyncrl.dashboard.access import Access
from asyncrl.dashboard.runs import shown_runs
from asyncrl.dashboard.server import application
from asyncrl.machine.ports import LOOPBACK
from asyncrl.observe.sinks import JsonLines, metrics_file
from tests.helpers import GENEROUS_S

T = TypeVar("T")

TOKEN = "the-token"
PORT = 8123


def make_run(folder: Path, steps: int = 5, **changes: Any) -> Path:
    """A folder with the metrics of a learner; each row has the `changes` too."""
    learner = JsonLines(metrics_file(folder, "learner"), clock=iter(range(1000, 10**9)).__next__)
    for step in range(steps):
        learner.log(step, {"reward/mean": step / 10, "trajectories_trained": 8.0 * step, "tokens": 100.0, **changes})
    learner.close()
    return folder


def served(folders: list[Path], visit: Callable[[int], Awaitable[T]]) -> T:
    """Return the result of `visit`, which gets the port of a server that shows the runs."""

    async def serve() -> T:
        app = application(shown_runs(map(str, folders)), Access(TOKEN))
        server = page_server(app)
        port = await server.start(host=LOOPBACK, port=0)
        try:
            return await visit(port)
        finally:
            await server.close()

    return asyncio.run(serve())


def answers(
    folders: list[Path],
    paths: Sequence[str],
    headers: Mapping[str, str] = {},
    method: str = "GET",
    token: str = TOKEN,
) -> list[tuple[int, Mapping[str, str], bytes]]:
    """Status, headers and body of the answer to each request. The paths have no token."""

    async def ask(port: int) -> list[tuple[int, Mapping[str, str], bytes]]:
        cookies = {Access(TOKEN).cookie: token}
        found: list[tuple[int, Mapping[str, str], bytes]] = []
        async with ClientSession(cookies=cookies, cookie_jar=CookieJar(unsafe=True)) as session:
            for path in paths:
                async with session.request(method, f"http://{LOOPBACK}:{port}{path}", headers=headers) as each:
                    found.append((each.status, each.headers, await each.read()))
        return found

    return served(folders, ask)


def answer(folders: list[Path], path: str, **how: Any) -> tuple[int, Mapping[str, str], bytes]:
    """Return the answer to one request, as `answers` does for several."""
    return answers(folders, [path], **how)[0]


def values(folders: list[Path], path: str) -> Any:
    """The plain values of an answer. Fails if it is refused."""
    status, _, body = answer(folders, path)
    assert status == 200, body
    return json.loads(body)


def table(folders: list[Path]) -> Any:
    """The table of all runs. An answer on a slow machine may have only one run more than the answer before."""
    status, _, body = answers(folders, ["/api/table"] * len(folders))[-1]
    found = json.loads(body)
    assert status == 200, body
    assert found["complete"]
    return found


@contextmanager
def dashboard(*folders: Path, options: Sequence[str] = (), browser: str = "true") -> Iterator[str]:
    """The address of the page, which `asyncrl dashboard` serves as long as the block lasts. Fails unless a Ctrl-C then
    ends it at once and silently. `browser` is the command that opens addresses."""
    command = [sys.executable, "-m", "asyncrl", "dashboard", *map(str, folders), *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "BROWSER": browser}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        try:
            assert "http://" in line, server.communicate()[1]
            yield line[line.index("http://") :].strip()
        finally:
            server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=GENEROUS_S)
        assert (server.returncode, errors) == (0, "")
