"""Says which line of the user's own code has run for long, such as a tool that blocks or an import that never ends.

A thread looks at the stacks of all other threads.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from asyncrl.machine.blocked_loop import BLOCKED_S, LOOP, TICK_S
from asyncrl.text import is_own, line_of

log = logging.getLogger(__name__)

IN_LOOP = (
    " and blocks the event loop. In a run, no other episode of the same actor goes on meanwhile: await instead, or run "
    "code that blocks with `await asyncio.to_thread(...)` (docs/tools.md)"
)


class SlowCode:
    """Logs calls of the user's own code that have run for `limit_s`, each once.

    - `base`: this frame of a thread and the frames that called it belong to the program, and are not watched
    - `clock`: gives monotonic seconds
    - `frames`: gives the innermost frame of each thread
    """

    def __init__(
        self,
        base: FrameType | None,
        limit_s: float = BLOCKED_S,
        clock: Callable[[], float] = time.monotonic,
        frames: Callable[[], Mapping[int, FrameType]] = sys._current_frames,
    ) -> None:
        self._base, self._limit_s, self._clock, self._frames = base, limit_s, clock, frames
        self._running: dict[int, tuple[tuple[FrameType, FrameType | None], float]] = {}
        """Maps each thread to the outermost frame of the user's code, the frame in which an event loop calls it, and
        the time at which they were seen first. A call that was already logged has an infinite time."""

    def look(self) -> None:
        """Log the calls that have run for too long. Called again and again."""
        now, before = self._clock(), self._running
        self._running = {}
        for thread, frame in self._frames().items():
            own, by_loop = _own(frame, self._base)
            if not own:
                continue
            call = own[-1], by_loop
            same, since = before.get(thread, (None, now))
            since = since if same == call else now
            if now - since >= self._limit_s:
                line = f"{line_of(own[0].f_code.co_filename, own[0].f_lineno)}, in {own[0].f_code.co_name},"
                log.warning("%s has run for %.0f s%s", line, now - since, IN_LOOP if by_loop else "")
                since = float("inf")
            self._running[thread] = (call, since)


def _own(frame: FrameType | None, base: FrameType | None) -> tuple[list[FrameType], FrameType | None]:
    """The frames of the user's code down to `base`, the innermost first, and the frame in which an event loop calls
    them. The second frame tells calls apart: a coroutine keeps its frame while others run, but each call by the loop
    has a new frame."""
    own, by_loop = list[FrameType](), None
    while frame is not None and frame is not base:
        if is_own(frame.f_code.co_filename):
            own.append(frame)
        if own and frame.f_code.co_filename == str(LOOP):
            by_loop = frame
        frame = frame.f_back
    return own, by_loop


def _caller() -> FrameType | None:
    """The frame that entered the context manager below."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename in (__file__, contextlib.__file__):
        frame = frame.f_back
    return frame


@contextmanager
def watched_code(limit_s: float = BLOCKED_S) -> Iterator[None]:
    """Watch the user's own code during the block."""
    watch, over = SlowCode(_caller(), limit_s), threading.Event()

    def look() -> None:
        while not over.wait(min(TICK_S, limit_s / 2)):
            watch.look()

    threading.Thread(target=look, name="slow-code", daemon=True).start()
    try:
        yield
    finally:
        over.set()
