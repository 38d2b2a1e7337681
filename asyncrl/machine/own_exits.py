"""Reports a call of `os._exit` in the user's own code. Such a call ends the process at once, and without a message."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def reported_exits(report: Callable[[int], int]) -> Iterator[None]:
    """During the block, `os._exit` calls `report` with its status, and ends the process with the status that `report`
    returns. Processes that are forked meanwhile end as they would without this."""
    leave, own = os._exit, os.getpid()

    def reported(status: int) -> NoReturn:
        leave(report(status) if os.getpid() == own else status)

    os._exit = reported
    try:
        yield
    finally:
        os._exit = leave
