"""A condition to wait for within one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Condition:
    """Like asyncio.Condition, but without a lock: for tasks of one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify_all(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], T], seconds: float | None = None) -> T:
        """Wait for a true value of `predicate`, which is called now and after every `notify_all`.

        Returns the true value, or after `seconds` the last value.
        """
        if value := predicate():
            return value
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not predicate():
                    await self._changed.wait()
        return predicate()
