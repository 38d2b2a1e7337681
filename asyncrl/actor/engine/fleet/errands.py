"""What a fleet does beside its turns, and whose end nobody waits for until the fleet itself ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

from asyncrl.errors import EngineError

ERRANDS_S = 1.0
PARTING_S = 6.0
"""More than the end of a cut update takes, and than a process group needs to end."""
CUT_S = 0.5
CUTS = 2
"""Who is cut off in the middle of something goes on to close its connection; that may have to be cut off as well."""
END_S = ERRANDS_S + PARTING_S + CUTS * CUT_S
"""`end` takes no longer."""


class Errands:
    """Tasks of one loop; an EngineError of theirs is nobody's business."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            with suppress(EngineError):
                await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self, partings: Iterable[Coroutine[Any, Any, None]]) -> int:
        """Cut short what is under way, run `partings` beside what that still has to do, and return how many of all
        these were not done in time."""
        await _wait(self._tasks, ERRANDS_S)
        for task in self._tasks:
            task.cancel()
        for parting in partings:
            self.run(parting)
        late = left = await _wait(self._tasks, PARTING_S)
        for _ in range(CUTS):
            for task in left:
                task.cancel()
            left = await _wait(left, CUT_S)
        return len(late)


async def _wait(tasks: set[asyncio.Task[None]], seconds: float) -> set[asyncio.Task[None]]:
    """Those that are not done after `seconds`."""
    return (await asyncio.wait(tasks, timeout=seconds))[1] if tasks else set()
