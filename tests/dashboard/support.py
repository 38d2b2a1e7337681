"""A server of the page in this process, and runs for it to show."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, CookieJar
from aiohttp.test_utils import TestServer

from asyncrl.dashboard.access import Access
from asyncrl.dashboard.runs import shown_runs
from asyncrl.dashboard.server import application
from asyncrl.observe.sinks import JsonLines, metrics_file

TOKEN = "the-token"
PORT = 8123


def make_run(folder: Path, steps: int = 5, **changes: Any) -> Path:
    """A folder with the metrics of a learner; each row has the `changes` too."""
    learner = JsonLines(metrics_file(folder, "learner"), clock=iter(range(1000, 10**9)).__next__)
    for step in range(steps):
        learner.log(step, {"reward/mean": step / 10, "trajectories_trained": 8.0 * step, "tokens": 100.0, **changes})
    learner.close()
    return folder


def answer(
    folders: list[Path], path: str, headers: Mapping[str, str] = {}, method: str = "GET", token: str = TOKEN
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body of the answer to one request. `path` has no token."""

    async def ask() -> tuple[int, Mapping[str, str], bytes]:
        server = TestServer(application(shown_runs(map(str, folders)), Access(PORT, TOKEN)))
        cookies = {f"asyncrl-dashboard-{PORT}": token}
        async with (
            server,
            ClientSession(cookies=cookies, cookie_jar=CookieJar(unsafe=True)) as session,
            session.request(method, server.make_url(path), headers=headers) as found,
        ):
            return found.status, found.headers, await found.read()

    return asyncio.run(ask())


def values(folders: list[Path], path: str) -> Any:
    """The plain values of an answer. Fails if it is refused."""
    status, _, body = answer(folders, path)
    assert status == 200, body
    return json.loads(body)


@contextmanager
def dashboard(*folders: Path) -> Iterator[str]:
    """The address of the page, which `asyncrl dashboard` serves as long as the block lasts. Fails unless a Ctrl-C then
    ends it at once and silently."""
    command = [sys.executable, "-m", "asyncrl", "dashboard", *map(str, folders)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
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
            _, errors = server.communicate(timeout=60)
        assert (server.returncode, errors) == (0, "")
