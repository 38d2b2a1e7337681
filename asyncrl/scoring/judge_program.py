"""The program of a process that runs users' code: it answers the requests of a pool (`judges.py`) from a pipe.

If a request takes too long, the process writes the stacks of its threads into a file of the pool, and ends itself. It
also writes them when it crashes, and the user's part of them when the code calls `os._exit`.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, TextIO

from msgspec.structs import replace

from asyncrl import wire
from asyncrl.errors import AsyncrlError, WireError
from asyncrl.machine.own_exits import reported_exits
from asyncrl.scoring.pipe import TimedPipe
from asyncrl.text import encodable, is_own, printable, reason_of
from asyncrl.wire import Message

logger = logging.getLogger(__name__)

Answer = Callable[[Sequence[Message], float], Message]
"""Answers a request, which consists of several messages. The second argument is the deadline for the answer, on the
clock `time.monotonic`. An exception ends the process."""


def serve(arguments: Sequence[str], load: Callable[[Mapping[str, Any]], Answer]) -> None:
    """Answer each request from the pipe until the pipe is closed. Then kill all processes of the session, including
    this process.

    `arguments`, from the command line, hold the file descriptors of the pipe and of the file for stacks. The pipe's
    first message has the settings, among them `timeout_s`, the limit of a request. `load` makes the answering function
    from the settings; an error that `load` raises is sent to the scorer.
    """
    # With these signals, Slurm asks a scorer to stop or to drain. Slurm sends them to this process too, which ignores
    # them, because the scorer may still need it.
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    fd, stacks = map(int, arguments)
    # Processes that the code starts must not inherit the pipe, since they would hold it open.
    for each in (fd, stacks):
        os.set_inheritable(each, False)
    faulthandler.enable(stacks)

    def report(status: int) -> int:
        own = [each for each in traceback.extract_stack()[::-1] if is_own(each.filename)]
        lines = [f'  File "{each.filename}", line {each.lineno} in {each.name}\n' for each in own]
        os.write(stacks, "".join(lines).encode())
        return status

    output = sys.stdout  # The code may replace it.
    try:
        with closing(TimedPipe(socket.socket(fileno=fd))) as pipe, suppress(EOFError), reported_exits(report):
            _serve(pipe, stacks, output, json.loads(pipe.receive()), load)
    except Exception:
        logger.exception("a process that runs users' code has failed")
    finally:
        _flush(output)
        os.killpg(0, signal.SIGKILL)


def _serve(
    pipe: TimedPipe,
    stacks: int,
    output: TextIO,
    settings: Mapping[str, Any],
    load: Callable[[Mapping[str, Any]], Answer],
) -> None:
    """Make the function that answers, then answer requests without end. Raises EOFError: the pipe was closed."""
    try:
        answer = load(settings)
    except AsyncrlError as error:
        _send(pipe, failed(str(error)))
        return
    except BaseException as error:
        logger.exception("a process that runs users' code cannot start")
        _send(pipe, failed(reason_of(error)))
        return
    _send(pipe, Message("ready"))
    while True:
        count, number = map(int, pipe.receive().split())
        requests = [pipe.receive() for _ in range(count)]
        faulthandler.dump_traceback_later(settings["timeout_s"], exit=True, file=stacks)
        deadline = time.monotonic() + settings["timeout_s"]
        messages = [wire.decode(wire.split(each), wire.MAX_LARGE_HEADER_BYTES) for each in requests]
        try:
            reply = answer(messages, deadline)
        except Exception:
            raise
        except BaseException as error:  # noqa: BLE001 - users' code raised it, since no signal raises one here
            reply = failed(f"{settings['judge']} raised {reason_of(error)}")
        faulthandler.cancel_dump_traceback_later()
        _flush(output)
        _send(pipe, replace(reply, sequence=number))


def _flush(output: TextIO) -> None:
    """Write the code's output, which Python keeps in a buffer if it goes to a file."""
    with suppress(ValueError, OSError):  # The code may have closed it. That is not a failure of the request.
        output.flush()


def failed(reason: str) -> Message:
    """The answer to a request that failed: the reason, without escape sequences for terminals, and no score."""
    return Message("failed", 0, {"reason": printable(encodable(reason))})


def _send(pipe: TimedPipe, message: Message) -> None:
    try:
        frames = wire.encode(message)
    except WireError as error:
        frames = wire.encode(replace(failed(f"the scores cannot be sent: {error}"), sequence=message.sequence))
    pipe.send(wire.join(frames))
