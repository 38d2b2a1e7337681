"""What the main thread of each rank does, and which rank holds up the others.

A process can run while its main thread is stuck in a kernel or a collective. So each rank counts how often its main
thread advances: with each phase, pass and collective. A rank that waits for the replay or the disk is not stuck, and
neither are the ranks that wait for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import msgspec

COLLECTIVES = str(Path("torch", "distributed"))
"""Where the code is in which a rank waits for other ranks."""
FRAMES = 4
"""How many of a thread's innermost calls tell whether it is in a collective."""
SHOWN_PARTS = 3
"""How much of a file's path names it."""


class RankState(msgspec.Struct, frozen=True):
    """What the main thread of one rank does. `waits`: for the replay, the disk or its start. `in_collective`: for other
    ranks. `still_s`: seconds since it last advanced."""

    rank: int
    advances: int
    phase: str
    where: str
    waits: bool
    in_collective: bool
    still_s: float = 0.0

    def __str__(self) -> str:
        does = "waits" if self.waits else "waits for other ranks" if self.in_collective else "works"
        return f"rank {self.rank} {does} in phase {self.phase}, at {self.where}"


class Activity:
    """What the main thread of this rank does. It calls every method but `state`."""

    def __init__(self) -> None:
        self._advances = 0
        self._phase = "start"
        self._waits = True

    def advance(self) -> None:
        """The main thread has got on."""
        self._advances += 1

    def enter(self, phase: str) -> None:
        """The phase that begins now. A rank is never stuck before the first one."""
        self._phase, self._waits = phase, False
        self.advance()

    def waiting(self) -> AbstractContextManager[None]:
        """Within the block this rank waits for something other than ranks."""
        return self._as(waits=True)

    def working(self) -> AbstractContextManager[None]:
        """Within the block it does not, although it is within a block of `waiting`."""
        return self._as(waits=False)

    @contextmanager
    def _as(self, waits: bool) -> Iterator[None]:
        before, self._waits = self._waits, waits
        self.advance()
        try:
            yield
        finally:
            self._waits = before
            self.advance()

    def state(self, rank: int) -> RankState:
        """What the main thread does now."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        calls = [f"{each.f_code.co_filename}:{each.f_lineno} in {each.f_code.co_name}" for each in _innermost(frame)]
        where = "/".join(calls[0].split("/")[-SHOWN_PARTS:]) if calls else "its end"
        in_collective = any(COLLECTIVES in call for call in calls)
        return RankState(rank, self._advances, self._phase, where, self._waits, in_collective)


def _innermost(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def find_stuck(states: Sequence[RankState], limit_s: float) -> str | None:
    """Which rank is stuck and where the others are; None where no rank is. A rank is stuck if it works on the same for
    `limit_s`; so are all ranks that wait for each other for so long."""
    stuck = [each for each in states if not each.waits and each.still_s >= limit_s]
    working = [each for each in stuck if not each.in_collective]
    if not stuck or (not working and len(stuck) < len(states)):
        return None
    first = max(working or stuck, key=lambda each: each.still_s)
    others = "".join(f"; {each}" for each in states if each is not first)
    return f"{first}, and has not advanced for {first.still_s:.0f} s (learner.rank_timeout_s){others}"
