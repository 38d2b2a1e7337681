"""Keeps users' code from ending the whole actor with SystemExit or CancelledError."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class EscapeError(Exception):
    """A user's code tried to end the program, or raised CancelledError although it was not cancelled."""

    # Code that waits for a cancelled task also raises CancelledError. Without this class, SystemExit or CancelledError
    # would end the actor with all its episodes.


async def contained(call: Callable[[], Awaitable[T]]) -> T:
    """Wait for the result of `call`, and pass on its exceptions.

    Raises EscapeError instead of SystemExit, and instead of CancelledError if this task was not cancelled.
    """
    try:
        return await call()
    except SystemExit as end:
        raise EscapeError(f"it tried to end the program: SystemExit({end.code!r})") from end
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise EscapeError("it raised CancelledError, though it was not cancelled") from error
