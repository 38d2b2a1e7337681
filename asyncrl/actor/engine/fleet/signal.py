"""A condition that many tasks of one loop wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """`notify` lets everybody who waits look again."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Whether `condition` came true within `seconds`; it is tried now and after every `notify`."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._next.wait()
        except TimeoutError:
            return condition()
        return True
