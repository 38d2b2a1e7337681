"""Work that a cancellation does not interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Wait until `work` is done. If the caller is cancelled meanwhile, raise CancelledError when the work is done."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    finally:
        await task
