"""Work that a cancellation does not interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finish(work: Coroutine[Any, Any, object]) -> None:
    """Wait until `work` is done. If the caller is cancelled meanwhile, raise CancelledError when the work is done."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            # A second cancellation must not reach the work either, and `wait` never cancels what it waits for.
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    task.result()
