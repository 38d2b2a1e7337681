"""Threads for the work on weights: reading, copying, writing.

asyncio's own threads belong to tools, which may block all of them for as long as they like. A version takes a few calls
for each server, and seconds, so a call has a thread of its own: it waits for nobody, and there is no pool to close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

TRANSPORT_THREAD = "weights-transport"


async def in_own_thread(call: Callable[[], T]) -> T:
    """What `call` gives; a caller that is cancelled leaves it running, and the exit of the process waits for it."""
    return await asyncio.wrap_future(begin(call))


def begin(call: Callable[[], T], name: str = "weights-work", *, daemon: bool = False) -> Future[T]:
    """As `in_own_thread`, without waiting; the exit does not wait for a `daemon`."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    Thread(target=_work, args=(call, done), name=name, daemon=daemon).start()
    return done


class OwnThreads:
    """Runs each call in a thread of its own, for calls that may hang for ever.

    A call that hangs holds up neither other calls nor the exit. But an exit that finds a call still within torch aborts
    the process, so wait with `ended` first.
    """

    def __init__(self) -> None:
        self._running: set[Future[Any]] = set()

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """What `call` gives; a caller that is cancelled leaves it running."""
        done = begin(call, TRANSPORT_THREAD, daemon=True)
        self._running.add(done)
        done.add_done_callback(self._running.discard)
        return asyncio.wrap_future(done)

    async def ended(self, seconds: float) -> None:
        """Return once all calls have ended, or after `seconds`."""
        calls = asyncio.gather(*map(asyncio.wrap_future, list(self._running)), return_exceptions=True)
        await asyncio.wait([calls], timeout=seconds)


def _work(call: Callable[[], T], done: Future[T]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
        done.set_exception(error)
        # Or the error, whose traceback knows this frame, would keep itself and what the call held.
        del call, done
