"""Starts programs whose input and output are pipes of the event loop."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import SubprocessStreamProtocol
from collections.abc import Sequence
from typing import Any

from asyncrl.machine.finishing import finish


class ProgramProtocol(SubprocessStreamProtocol):
    """Sets `exited` once the program itself has ended. `Process.wait` would also wait for all other processes that hold
    the program's pipes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        super().__init__(limit=limit, loop=loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


async def start_program(
    command: Sequence[str], limit: int, **options: Any
) -> tuple[asyncio.SubprocessTransport, ProgramProtocol]:
    """Start a program in a new session. `limit` is the limit of the buffers that hold its output, and `options` are the
    options of Popen.

    If the caller is cancelled meanwhile, the program is killed. Raises OSError: it cannot be started.
    """
    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(
        loop.subprocess_exec(lambda: ProgramProtocol(loop, limit), *command, start_new_session=True, **options)
    )
    try:
        # A cancellation must not reach asyncio. It would kill only the program, and then wait until the program's
        # children, which hold its pipes, have ended.
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_kill)
        await finish(asyncio.wait([starting]))
        raise


def _kill(started: asyncio.Future[tuple[asyncio.SubprocessTransport, ProgramProtocol]]) -> None:
    if not started.cancelled() and started.exception() is None:
        transport, _ = started.result()
        transport.close()
