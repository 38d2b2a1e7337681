"""Starts sessions by forking itself, which is much faster than starting Python.

A request is one packet: JSON with `arguments`, as `Options` reads them, and `folder`. It carries the open files of the
control socket, of the cells and of the output. The server does nothing else, so that it can share its memory with the
sessions. It ends with its caller.
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
"""The argument in place of the program's file, which a session does not have."""


def main() -> None:
    ignore_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # With SIG_IGN the kernel removes children that have ended, so this process need not wait for them.
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
    """Become the launcher of a session. After `launch` this is the program's process, which runs the cells."""
    control, requests, output = fds
    os.environ.update(HOME=folder, TMPDIR=folder)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    options = Options([str(control), NO_FILE, *arguments])
    os.chdir("/" if options.namespaces else folder)
    launch(options)
    os.close(control)
    cells.serve(requests, requests)
