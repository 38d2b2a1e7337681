"""Process 1 of a container: runs a program, or the cells of a session, and reports the results.

A container gets the text of this file, of cells.py and of pausing.py as its arguments. Requests are lines of JSON on
standard input, and reports are lines on standard output. The end of the input means that the caller has ended. Then
this process ends, and the kernel ends all other processes of the container.

This file imports only the standard library. The image's Python may be older than asyncrl's.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any, NoReturn

MAX_OUTPUT = 1 << 20
"""The maximum number of bytes in a program's output, and in each file that the program writes."""
KILLED = 128 + signal.SIGKILL
PROC = "/proc"
PR_SET_DUMPABLE = 4


def main() -> None:
    woken, wake = guard()
    lines = read_lines()
    request = next(lines)
    output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open until this process ends
    requests, replies = os.pipe(), os.pipe()
    program = os.fork()
    if program == 0:
        unguard()
        for fd in (woken, wake, requests[1], replies[0]):
            os.close(fd)
        become_program(request, output, requests[0], replies[1])
        return
    os.close(requests[0])
    os.close(replies[1])
    watch(program, request, lines, output, woken, requests[1], replies[0])


def guard() -> tuple[int, int]:
    """Protect this process from its program. Returns both ends of a pipe that gets a byte whenever a child ends."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # The kernel protects process 1 only from signals that have no handler. Python installs a handler for SIGINT, so
    # SIGINT is ignored explicitly.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_dumpable(False)
    signal.set_wakeup_fd(wake)
    return woken, wake


def unguard() -> None:
    """Restore the usual handling of signals. The child that becomes the program calls this."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    set_dumpable(True)


def watch(
    program: int,
    request: dict[str, Any],
    lines: Iterator[dict[str, Any]],
    output: IO[bytes],
    woken: int,
    cells: int,
    ended: int,
) -> NoReturn:
    """Report how each request ended, until the process `program` ends, its time is over, or the caller ends. In a
    session, the requests in `lines` are cells, which are passed on to the session.

    `woken` is readable after a child has ended. Cells are sent to the session through `cells`, and its reply after each
    cell arrives at `ended`. Between two cells the session is paused.
    """
    is_session = "program" not in request
    pausing = load(sys.argv[2], "pausing.py") if is_session else {}
    poll = polled(0, woken, *([ended] if is_session else []))
    pause: Any = None
    # The first request of a session is empty, so the first deadline is for the start of the session.
    began = time.monotonic()
    deadline = began + request.get("wall_s", 60.0)
    while True:
        status = reap(program)
        if pause is not None and (status is not None or pause.is_broken):
            pausing["signal_all"](PROC, signal.SIGKILL)
            # A report must answer a request, so this report waits for the next request.
            if next(lines, None) is not None:
                report(output, status or KILLED, began, "" if status else pausing["RAN_IN_PAUSE"])
            os._exit(0)
        if status is not None or (pause is None and time.monotonic() >= deadline):
            # If a session exits with status 0, the report says 1, because 0 would mean that the session continues.
            report(output, status or 1 if is_session and status is not None else status, began)
            os._exit(0)
        timeout = max(0.0, deadline - time.monotonic()) if pause is None else pause.wait_s
        ready = [fd for fd, _ in poll.poll(timeout * 1000 + 1)]
        if woken in ready:
            os.read(woken, 4096)
        if ended in ready and os.read(ended, 4096):
            pause = pausing["Pause"](PROC)
            report(output, 0, began)
        if pause is not None:
            pause.look()
        if 0 in ready:
            cell = next(lines, None)
            if cell is None:
                os._exit(1)
            if pause is not None:
                pause.end()
            pause = None
            began = time.monotonic()
            deadline = began + cell["wall_s"]
            pass_on(cell, cells)


def polled(*fds: int) -> select.poll:
    """A poll for input on these descriptors."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


def pass_on(cell: dict[str, Any], cells: int) -> None:
    """Send a cell to the session."""
    # The session may be ending at this moment. Then the next round reports it as the end of this cell.
    with suppress(BrokenPipeError):
        os.write(cells, json.dumps(cell).encode() + b"\n")


def become_program(request: dict[str, Any], output: IO[bytes], requests: int, replies: int) -> None:
    """Run the program, or cells, in this process."""
    given = tempfile.TemporaryFile()  # noqa: SIM115 - open until this process ends
    given.write(request.get("stdin", "").encode(errors="replace"))
    given.seek(0)
    # docker's own limit would also hold for the file of standard input.
    _, present = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = MAX_OUTPUT if present == resource.RLIM_INFINITY else min(present, MAX_OUTPUT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(given.fileno(), 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno() if request.get("errors", True) else nothing, 2)
    fcntl.fcntl(1, fcntl.F_SETFL, os.O_APPEND)
    if "program" not in request:
        load(sys.argv[1], "cells.py")["serve"](requests, replies)
        os._exit(0)
    os.close(requests)
    os.close(replies)
    sys.argv[:] = ["-"]
    sys.modules["__main__"] = module = type(sys)("__main__")
    try:
        exec(compile(request["program"], "<stdin>", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - printed, as Python does
        frames = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, frames)
        sys.exit(1)


def load(text: str, name: str) -> dict[str, Any]:
    """Run the text of a file of asyncrl, and return the names that it defines."""
    names: dict[str, Any] = {"__name__": name}
    exec(compile(text, name, "exec"), names)
    return names


def set_dumpable(value: bool) -> None:
    """Allow or forbid other processes of the same user to access the memory and files of this process."""
    # Programs run as the same user as this process. With access to this process, they could forge reports.
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(value), 0, 0, 0)


def read_lines() -> Iterator[dict[str, Any]]:
    """Yield the requests as they arrive."""
    kept = b""
    while True:
        part = os.read(0, 1 << 16)
        if not part:
            return
        kept += part
        *ended, kept = kept.split(b"\n")
        for line in ended:
            yield json.loads(line)


def reap(program: int) -> int | None:
    """Reap ended processes. Returns the program's status (128 + signal if it was killed) if it has ended, else None."""
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == program:
                return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
            if pid == 0:
                return None
    except ChildProcessError:
        return None


def report(output: IO[bytes], status: int | None, began: float, reason: str = "") -> None:
    """Send the output so far, and clear it. `status` is None if the time is over.

    `reason` says why this process killed the program, if the status does not show it.
    """
    printed = os.pread(output.fileno(), MAX_OUTPUT, 0).decode(errors="replace")
    os.ftruncate(output.fileno(), 0)
    line = {"status": status, "seconds": time.monotonic() - began, "output": printed, "reason": reason}
    with os.fdopen(1, "wb", closefd=False) as out:
        out.write(json.dumps(line).encode() + b"\n")


main()
