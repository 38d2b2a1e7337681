"""`asyncrl dashboard RUN... [--port N] [--open]`: a page that shows runs, while they run and afterwards.

RUN is the folder of a run, such as runs/NAME, or its name, or a folder of runs. Several runs are shown in the same
figures. The command only reads, so Ctrl-C can end it at any time.

The page listens on this machine only, and its address has a token. For a run on another machine start the command
there, and forward its port: `ssh -L PORT:127.0.0.1:PORT HOST`. docs/watching.md has more.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import logging
import signal
import socket
import sys
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from aiohttp import web

from asyncrl.config.commands import command_name
from asyncrl.config.exits import exit_status
from asyncrl.dashboard.access import Access
from asyncrl.dashboard.runs import ShownRun, shown_runs
from asyncrl.dashboard.server import application
from asyncrl.machine.ports import LOOPBACK
from asyncrl.network.http_server import ConnectionBounds, HttpServer

log = logging.getLogger(__name__)

BOUNDS = ConnectionBounds(connections=256)


def main(argv: Sequence[str]) -> None:
    """The entry of the command line. Raises ConfigError: there is nothing to show."""
    given = _parser().parse_args(argv)
    runs = shown_runs(given.runs)
    with _browser() if given.open else nullcontext() as browse:
        asyncio.run(serve(runs, given.port, lambda url: _tell(url, runs, browse)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, its name, or a folder of runs")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port to listen on (0: a free one)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    return parser


def _tell(url: str, runs: Mapping[str, ShownRun], browse: Callable[[str], object] | None) -> None:
    names = ", ".join(str(run.folder) for run in runs.values())
    sys.stdout.write(f"the page of {names}: {url}\nCtrl-C ends it\n")
    sys.stdout.flush()
    if browse is not None:
        browse(url)


@contextmanager
def _browser() -> Iterator[Callable[[str], object]]:
    """Yield a function that opens an address in a browser. The browser gets a file that redirects to the address, and
    only this user can read the file. If the browser got the address itself, every user of the machine could read the
    address among the arguments of the browser's process."""
    with TemporaryDirectory(prefix="asyncrl-page-") as folder:
        file = Path(folder) / "open.html"

        def browse(url: str) -> None:
            to = html.escape(url)
            file.touch(0o600)
            file.write_text(f'<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">the page</a>\n')
            webbrowser.open(file.as_uri())

        yield browse


async def serve(runs: Mapping[str, ShownRun], port: int, listening: Callable[[str], None]) -> None:
    """Serve the runs until a signal comes. `listening` is called with the address of the page once it can be opened.

    Raises OSError: the port is taken.
    """
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    with socket.create_server((LOOPBACK, port)) as server:
        chosen = server.getsockname()[1]
        access = Access()
        http = page_server(application(runs, access))
        try:
            await http.start(sock=server)
            listening(f"http://{LOOPBACK}:{chosen}/?token={access.token}")
            await ended.wait()
        finally:
            await http.close()


def page_server(app: web.Application) -> HttpServer:
    """The server of the page, which listens nowhere yet."""
    return HttpServer(app, BOUNDS, log, "the page's port received something that is not a request", shutdown_s=0.5)


if __name__ == "__main__":
    sys.exit(exit_status(partial(main, sys.argv[1:]), "asyncrl dashboard"))
