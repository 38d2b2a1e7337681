"""Runs the synchronous methods of one episode one after another, in a thread of their own.

An environment may hold an object that belongs to one thread, such as a connection of sqlite3. A call that takes too
long cannot be stopped: its thread is abandoned, and ends when the call returns. An abandoned thread never keeps the
process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from asyncrl.tools.contained import escape_of

T = TypeVar("T")


class _Outcome(NamedTuple):
    value: Any = None
    error: Exception | None = None


_Work = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[_Outcome]"]


class EpisodeThread:
    """Runs calls in one thread, which starts with the first call. `close` ends the thread, which then calls `ended`."""

    def __init__(self, name: str, ended: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._ended = ended
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running = 0

    @property
    def is_busy(self) -> bool:
        """True if a call has not returned yet. Its caller may have been cancelled meanwhile."""
        return self._running > 0

    async def call(self, function: Callable[[], T]) -> T:
        """Call `function` in the thread. Passes on its exceptions. Raises EscapeError instead of an exception that
        would end the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Outcome] = loop.create_future()
        self._running += 1
        self._work.put((function, loop, future))
        outcome = await future
        if outcome.error is not None:
            raise outcome.error
        value: T = outcome.value
        return value

    def close(self) -> None:
        """End the thread once it has run the calls that are queued."""
        if self._thread is not None:
            self._work.put(None)

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                function, loop, future = work
                outcome = _outcome(function)
                # The event loop may be closed by now. If so, no one waits for the outcome.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._tell, future, outcome)
        finally:
            self._ended()

    def _tell(self, future: asyncio.Future[_Outcome], outcome: _Outcome) -> None:
        self._running -= 1
        if not future.done():
            future.set_result(outcome)


def _outcome(function: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(function())
    except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
        return _Outcome(error=error)
    except BaseException as error:  # noqa: BLE001 - the thread must answer in all cases
        escape = escape_of(error)
        escape.__cause__ = error  # Its traceback has the line of the user's code.
        return _Outcome(error=escape)
