"""Keeps users' code from ending the whole actor. Such code may raise an exception that is not an `Exception`, or cancel
the task that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from asyncrl.machine.process import is_ctrl_c
from asyncrl.text import message_of

T = TypeVar("T")


class EscapeError(Exception):
    """A user's code tried to end the program, raised another exception that is not an `Exception`, or cancelled
    itself."""

    # Without this class, such an exception would end the actor with all its episodes. Libraries raise such exceptions,
    # too, for example for the timeouts of func_timeout and the failures of pytest.


async def contained(call: Callable[[], Awaitable[T]]) -> T:
    """Wait for the result of `call`, which runs in an asyncio task of its own. Passes on each `Exception` of `call`.

    Raises EscapeError instead of its other exceptions, and if `call` cancelled its task. Raises CancelledError if the
    caller was cancelled, even if `call` ignored that.
    """
    caller = asyncio.current_task()
    before = caller.cancelling() if caller is not None else 0
    try:
        result = await asyncio.ensure_future(_guarded(call))
    except asyncio.CancelledError as error:
        if _was_cancelled(caller, before):
            raise
        raise EscapeError("it raised CancelledError, or cancelled its own task") from error
    if _was_cancelled(caller, before):
        raise asyncio.CancelledError
    return result


def _was_cancelled(task: asyncio.Task[Any] | None, before: int) -> bool:
    return task is None or task.cancelling() > before


async def _guarded(call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await call()
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise escape_of(error) from error


def guarded_task(loop: asyncio.AbstractEventLoop, work: Any, /, **more: Any) -> asyncio.Task[Any]:
    """The task factory of an event loop that runs users' code: no task of the loop ends the loop."""
    # A user's code may start tasks, for instance by `asyncio.gather`. asyncio stops the event loop when a task raises
    # SystemExit or KeyboardInterrupt, even if another task waits for it.
    return asyncio.Task(_ending_only_itself(work), loop=loop, **more)


async def _ending_only_itself(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise escape_of(error) from error


def escape_of(error: BaseException) -> EscapeError:
    """The error to raise instead of `error`, which came from a user's code and is not an `Exception`.

    Passes on a KeyboardInterrupt that Ctrl-C may have raised.
    """
    if is_ctrl_c(error):
        raise error
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return EscapeError(f"it tried to end the program: {message_of(error)}")
    return EscapeError(f"it raised an exception that is not an Exception: {message_of(error)}")
