"""Runs each call of synchronous code in a thread of its own, so that a call that hangs does not occupy a thread that
another call needs.

A thread cannot be stopped. If the caller gives a call up, at a time limit or when its episode ends, the thread goes on.
It is counted until the call returns, and it never keeps the process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from asyncrl.network.throttle import Throttled
from asyncrl.text import is_own, line_of
from asyncrl.tools.contained import escape_of, guarded_task

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

MAX_STUCK = 1000
"""Further calls are refused while this many calls have been given up and have not returned."""
END_S = 2.0
"""The seconds that a shutdown waits for running calls that were not given up."""


def open_to_users(loop: asyncio.AbstractEventLoop, what: str) -> CallThreads:
    """Prepare an event loop to run users' code: no task ends the loop, and `asyncio.to_thread` starts a thread for each
    call. `what` names these calls in messages. Returns the threads."""
    threads = CallThreads(what)
    loop.set_default_executor(threads)
    loop.set_task_factory(guarded_task)
    return threads


class CallThreads(ThreadPoolExecutor):
    """An executor that starts a daemon thread for each call. `what` names the calls in messages.

    It derives from ThreadPoolExecutor because an event loop takes no other default executor.
    """

    def __init__(self, what: str) -> None:
        super().__init__(1)
        self._what = what
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._stuck: set[Future[Any]] = set()
        self._given_up = Throttled(log, f"a call of {what} was given up, and its thread still runs")

    @property
    def stuck(self) -> int:
        """The number of calls that were given up and have not returned."""
        return len(self._stuck)

    async def call(self, function: Callable[[], T]) -> T:
        """The result of `function`, which runs with the caller's context variables. Passes on each `Exception` of
        `function`. Raises EscapeError instead of its other exceptions. Raises RuntimeError: too many calls are
        stuck."""
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self, partial(context.run, function))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call. Raises RuntimeError: too many calls are stuck."""
        if self.stuck >= MAX_STUCK:
            raise RuntimeError(f"{MAX_STUCK} calls of {self._what} have not returned; find out what they wait for")
        call: _Call[T] = _Call(self._give_up)
        call.set_running_or_notify_cancel()
        with self._lock:
            self._running.add(call)
        thread = threading.Thread(target=self._run, args=(call, partial(fn, *args, **kwargs)), daemon=True)
        call.thread = thread
        thread.start()
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait, for at most END_S seconds, for the running calls that were not given up."""
        if wait:
            with self._lock:
                running = self._running - self._stuck
            futures.wait(running, END_S)

    def _run(self, call: _Call[T], function: Callable[[], T]) -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            self._end(call)
            call.set_exception(_raisable(error))
        else:
            self._end(call)
            call.set_result(result)

    def _end(self, call: Future[Any]) -> None:
        with self._lock:
            self._running.discard(call)
            self._stuck.discard(call)

    def _give_up(self, call: _Call[Any]) -> None:
        with self._lock:
            if call not in self._running or call in self._stuck:
                return
            self._stuck.add(call)
        line = _line(call.thread)
        self._given_up.say(f"{line or 'outside of your code'} (threads that still run: {self.stuck})")


class _Call(Future[T]):
    """A running call. `give_up` is called when the caller cancels the call."""

    thread: threading.Thread

    def __init__(self, give_up: Callable[[_Call[T]], None]) -> None:
        super().__init__()
        self._tell = give_up

    def cancel(self) -> bool:
        """Give the call up. Returns False, since a running call cannot be cancelled."""
        self._tell(self)
        return False


def _raisable(error: BaseException) -> BaseException:
    """The error that a coroutine may raise instead of `error`, with `error` as its cause."""
    if isinstance(error, StopIteration):  # A future cannot hold it.
        raised: Exception = RuntimeError("it raised StopIteration")
    elif isinstance(error, Exception):
        return error
    else:
        raised = escape_of(error)
    raised.__cause__ = error  # Its traceback has the line of the user's code.
    return raised


def _line(thread: threading.Thread) -> str:
    """The innermost line of the user's own code that a thread runs. Empty if there is none."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else line_of(frame.f_code.co_filename, frame.f_lineno)
