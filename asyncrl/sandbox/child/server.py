"""Starts sessions by forking itself, which takes a fraction of the time in which Python starts.

A request is one packet: JSON with `arguments`, as `Options` reads them, and `folder`. It carries the open files of the
control socket, of the cells and of the output. The server does nothing else, so that the memory that it shares with the
sessions does not change. It ends with its caller.
"""

import json
import os
import signal
import socket
import sys

from asyncrl.sandbox.child import cells
from asyncrl.sandbox.child.main import find_packages, ignore_signals, launch
from asyncrl.sandbox.child.options import Options

MAX_REQUEST = 1 << 16
NO_FILE = "-1"
"""The argument of a session, which has no file of a program."""


def main() -> None:
    ignore_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel reaps the children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    caller = socket.socket(fileno=int(sys.argv[1]))
    find_packages()
    while True:
        request, fds, _, _ = socket.recv_fds(caller, MAX_REQUEST, 3)
        if not request:
            return
        if os.fork() == 0:
            caller.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            start(fds, **json.loads(request))
            os._exit(0)
        for fd in fds:
            os.close(fd)


def start(fds: list[int], arguments: list[str], folder: str) -> None:
    """Become the launcher of a session. In the program's process, run the cells."""
    control, requests, output = fds
    os.environ.update(HOME=folder, TMPDIR=folder)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    options = Options([str(control), NO_FILE, *arguments])
    os.chdir("/" if options.namespaces else folder)
    launch(options)
    cells.serve(requests, requests)
