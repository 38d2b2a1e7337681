"""Threads for the work on weights: reading, copying, writing.

asyncio's own threads run tools, which may block all of these threads for any time. A version needs only a few calls for
each server, and each call takes seconds. So each call gets a new thread: no call waits for another, and there is no
pool to close.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

ROUTE_THREAD = "weights-route"


async def in_own_thread(call: Callable[[], T]) -> T:
    """Run `call` in a new thread and wait for its result.

    If the caller is cancelled, the call continues, and the exit of the process waits for it.
    """
    return await asyncio.wrap_future(begin(call))


def begin(call: Callable[[], T], name: str = "weights-work", *, daemon: bool = False) -> Future[T]:
    """Start `call` in a new thread. With `daemon`, the exit of the process does not wait for the call."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()
    Thread(target=_work, args=(call, done), name=name, daemon=daemon).start()
    return done


class NewestOnly:
    """Makes one call after the other in a thread called `name`. A call that waits for its turn is dropped, with all
    that it holds, as soon as a newer one comes."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = Lock()
        self._waiting: tuple[Callable[[], None], Future[None]] | None = None

    def begin(self, call: Callable[[], None]) -> Future[None]:
        """Let `call` wait for its turn, and drop the call that waited before. The future ends with `call`, and is
        cancelled if `call` is dropped."""
        done: Future[None] = Future()
        self._replace((call, done))
        self._thread.submit(self._take)
        return done

    def close(self) -> None:
        """Return once the running call has ended. A call that waits is dropped."""
        self._thread.shutdown(cancel_futures=True)
        self._replace(None)

    def _replace(self, waiting: tuple[Callable[[], None], Future[None]] | None) -> None:
        with self._lock:
            dropped, self._waiting = self._waiting, waiting
        if dropped is not None:
            dropped[1].cancel()
            dropped[1].set_running_or_notify_cancel()

    def _take(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting[1].set_running_or_notify_cancel():
            _work(*waiting)


class OwnThreads:
    """Runs each call in a new thread, for calls that may hang forever.

    A call that hangs blocks neither other calls nor the exit of the process. But a process that exits during a call
    into torch aborts, so wait with `ended` first.
    """

    def __init__(self) -> None:
        self._running: set[Future[Any]] = set()

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Start `call`. The future gets its result. If the caller is cancelled, the call continues."""
        done = begin(call, ROUTE_THREAD, daemon=True)
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
        # The error's traceback refers to this frame. If the frame kept these two variables, the error and the call's
        # data would stay in memory.
        del call, done
