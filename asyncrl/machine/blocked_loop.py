"""Names the user's code that blocks the event loop, such as a tool that sleeps or waits for a network without `await`.

While the loop is blocked, no other episode of the process goes on. A thread looks at the stack of the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from asyncrl.machine.activity import Activity
from asyncrl.text import is_own, line_of

log = logging.getLogger(__name__)

BLOCKED_S = 5.0
TICK_S = 1.0
LOOP = Path(asyncio.events.__file__)
"""The file whose frames call the code that runs in the loop."""


def running_line(frames: Callable[[], Mapping[int, FrameType]] = sys._current_frames) -> str:
    """The line of the user's own code that a thread of this process runs now; empty if no thread runs any."""
    return next(filter(None, map(_own_line, frames().values())), "")


def _own_line(frame: FrameType | None) -> str:
    """The innermost line of the user's own code above the event loop; empty if there is none."""
    while frame is not None and Path(frame.f_code.co_filename) != LOOP:
        if is_own(frame.f_code.co_filename):
            return f"{line_of(frame.f_code.co_filename, frame.f_lineno)}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


class BlockedLoop:
    """Finds the code that blocks the event loop of `thread` for `limit_s` seconds, logs each line of such code once,
    and shows it as the work of `activity`. `clock` gives monotonic seconds, and `frames` the innermost frame of each
    thread."""

    def __init__(
        self,
        thread: int,
        activity: Activity | None = None,
        limit_s: float = BLOCKED_S,
        clock: Callable[[], float] = time.monotonic,
        frames: Callable[[], Mapping[int, FrameType]] = sys._current_frames,
    ) -> None:
        self._thread = thread
        self._activity = activity
        self._limit_s = limit_s
        self._clock = clock
        self._frames = frames
        self._ticked = clock()
        self._lines: set[str] = set()
        self._shown = ""

    def tick(self) -> None:
        """Record that the loop runs. Called in the loop."""
        self._ticked = self._clock()

    def look(self) -> None:
        """Log the line that blocks the loop, if there is one. Called in another thread."""
        blocked_s = self._clock() - self._ticked
        line = self._line() if blocked_s >= self._limit_s else ""
        if line and line not in self._lines:
            self._lines.add(line)
            log.warning(
                "%s has blocked the event loop for %.0f s, so no episode of this process goes on: await instead, or "
                "run code that blocks with `await asyncio.to_thread(...)` (docs/tools.md)",
                *(line, blocked_s),
            )
        self._show(f"blocked by {line}" if line else "")

    def _line(self) -> str:
        """Return the innermost line of the user's own code that the loop runs, or an empty text if it runs none."""
        return _own_line(self._frames().get(self._thread))

    def _show(self, text: str) -> None:
        if self._activity is not None and self._activity.work in ("", self._shown):
            self._activity.work = text
        self._shown = text


@contextmanager
def watched_loop(activity: Activity | None = None, limit_s: float = BLOCKED_S) -> Iterator[None]:
    """Watch the running event loop during the block."""
    loop, over = asyncio.get_running_loop(), threading.Event()
    watch, tick_s = BlockedLoop(threading.get_ident(), activity, limit_s), min(TICK_S, limit_s / 2)

    def tick() -> None:
        watch.tick()
        if not over.is_set():
            loop.call_later(tick_s, tick)

    def look() -> None:
        while not over.wait(tick_s):
            watch.look()

    tick()
    threading.Thread(target=look, name="blocked-loop", daemon=True).start()
    try:
        yield
    finally:
        over.set()
