"""Calls that may hang for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_own_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """What `call` gives. Unlike the threads of an executor, its own holds up neither other calls nor the exit."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            done.set_exception(error)

    Thread(target=run, name="weights-transport", daemon=True).start()
    return asyncio.wrap_future(done)
