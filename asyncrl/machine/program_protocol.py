"""Reports the end of a program that asyncio started."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import SubprocessStreamProtocol


class ProgramProtocol(SubprocessStreamProtocol):
    """Sets `exited` once the program itself has ended. `Process.wait` would also wait for all other processes that hold
    the program's pipes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chunk: int) -> None:
        super().__init__(limit=chunk, loop=loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()
