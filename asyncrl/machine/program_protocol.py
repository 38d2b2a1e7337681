"""What asyncio does not tell of a program that it started: its own end."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import SubprocessStreamProtocol


class ProgramProtocol(SubprocessStreamProtocol):
    """Also tells when the program itself has ended: `Process.wait` waits for whatever else holds its pipes, too."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chunk: int) -> None:
        super().__init__(limit=chunk, loop=loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()
