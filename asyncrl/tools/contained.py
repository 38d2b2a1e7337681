"""Calls of users' code, which may raise an exception that would end more than the call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class EscapeError(Exception):
    """The code ended the program, or raised CancelledError without being cancelled."""

    # A wait for a task of its own that was cancelled raises CancelledError, too. asyncio would end the actor with all
    # its episodes.


async def contained(call: Callable[[], Awaitable[T]]) -> T:
    """Wait for the result of `call`.

    Raises what it raises, but EscapeError in place of SystemExit, and of a CancelledError that does not cancel this
    task.
    """
    try:
        return await call()
    except SystemExit as end:
        raise EscapeError(f"it ended the program: SystemExit({end.code!r})") from end
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise EscapeError("it raised CancelledError, though it was not cancelled") from error
