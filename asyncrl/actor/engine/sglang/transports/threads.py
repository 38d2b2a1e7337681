"""Calls that may hang for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from asyncrl.weights.threads import begin

T = TypeVar("T")

NAME = "weights-transport"


class OwnThreads:
    """Each call has a thread of its own. Unlike those of an executor, one that hangs holds up neither other calls nor
    the exit; but an exit that meets one within torch aborts the process, so wait for their end if there is one."""

    def __init__(self) -> None:
        self._running: set[Future[Any]] = set()

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """What `call` gives; whoever is cancelled leaves it running."""
        done = begin(call, NAME, daemon=True)
        self._running.add(done)
        done.add_done_callback(self._running.discard)
        return asyncio.wrap_future(done)

    async def ended(self, seconds: float) -> None:
        """Return once all calls have, or after `seconds`."""
        calls = asyncio.gather(*map(asyncio.wrap_future, list(self._running)), return_exceptions=True)
        await asyncio.wait([calls], timeout=seconds)
