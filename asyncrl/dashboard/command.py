"""`asyncrl dashboard RUN... [--port N] [--open]`: a page that shows runs, while they go on and after.

RUN is the folder of a run, such as runs/NAME, or its name, or a folder of runs. The figures of several runs are laid
over each other. The page listens on this machine only, and its address has a token. For a run on another machine start
the command there, and forward its port: `ssh -L PORT:127.0.0.1:PORT HOST`. It only reads, so Ctrl-C ends it at any
time. docs/watching.md has more.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable, Mapping

from aiohttp import web

from asyncrl.config.commands import command_name
from asyncrl.config.exits import failures_end_the_command
from asyncrl.dashboard.access import Access
from asyncrl.dashboard.runs import ShownRun, shown_runs
from asyncrl.dashboard.server import application
from asyncrl.machine.ports import LOOPBACK


def main() -> None:
    """The entry of the command line. Ends with a message and status 1 where there is nothing to show."""
    given = _parser().parse_args()
    with failures_end_the_command():
        runs = shown_runs(given.runs)
        asyncio.run(serve(runs, given.port, lambda url: _tell(url, runs, given.open)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, its name, or a folder of runs")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port to listen on (0: one that is free)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    return parser


def _tell(url: str, runs: Mapping[str, ShownRun], browse: bool) -> None:
    names = ", ".join(str(run.folder) for run in runs.values())
    sys.stdout.write(f"the page of {names}: {url}\nCtrl-C ends it\n")
    sys.stdout.flush()
    if browse:
        webbrowser.open(url)


async def serve(runs: Mapping[str, ShownRun], port: int, listening: Callable[[str], None]) -> None:
    """Serve the runs until a signal comes. `listening` is told the address of the page once it can be opened.

    Raises OSError: the port cannot be had.
    """
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    with socket.create_server((LOOPBACK, port)) as server:
        chosen = server.getsockname()[1]
        access = Access(chosen)
        runner = web.AppRunner(application(runs, access), access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.SockSite(runner, server).start()
            listening(f"http://{LOOPBACK}:{chosen}/?token={access.token}")
            await ended.wait()
        finally:
            await runner.cleanup()
