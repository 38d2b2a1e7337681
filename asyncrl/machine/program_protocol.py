"""The end of a program that asyncio started, which asyncio itself does not tell."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import SubprocessStreamProtocol


class ProgramProtocol(SubprocessStreamProtocol):
    """Tells when the program itself has ended, too: `Process.wait` waits for all processes that hold its pipes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chunk: int) -> None:
        super().__init__(limit=chunk, loop=loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()
