"""Finds the rank that is stuck, from the progress of each rank's main thread.

A process can run while its main thread is stuck in a kernel or a collective. So each rank counts how often its main
thread advances: with each phase, pass and collective. A rank that waits for the replay or the disk is not stuck, and
neither are the ranks that wait for it.

Time is counted in polls of the launcher, so that no rank is blamed for a time in which the launcher did not run.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import msgspec

from asyncrl.machine.activity import Activity

END = "end"
"""The phase in which a rank closes its resources, and exits."""
END_S = 60.0
"""Seconds that the phase END may take, even if other phases have a shorter limit."""

COLLECTIVES = str(Path("torch", "distributed"))
"""The folder of the code in which a rank waits for other ranks."""
FRAMES = 4
"""The number of a thread's innermost calls that are searched for a collective."""
SHOWN_PARTS = 3
"""Messages show only this many parts of a file's path, counted from its end."""


class RankState(msgspec.Struct, frozen=True):
    """The state of one rank's main thread.

    - `waits`: it waits for the replay or the disk, or has not begun its first phase.
    - `in_collective`: it waits for other ranks.
    - `unfinished`: the work that a stop should wait for.
    - `still_s`: the seconds since it last advanced.
    - `work`: a description of its long work, with the remaining time.
    """

    rank: int
    advances: int
    phase: str
    where: str
    waits: bool
    in_collective: bool
    unfinished: list[str] = []
    still_s: float = 0.0
    work: str = ""

    def limit_s(self, limit_s: float) -> float:
        """Return how many seconds this rank may be silent or stuck: `limit_s`, or at least END_S in the phase END."""
        return max(limit_s, END_S) if self.phase == END else limit_s

    def __str__(self) -> str:
        does = "waits" if self.waits else "waits for other ranks" if self.in_collective else "works"
        return f"rank {self.rank} {does} in phase {self.phase}, at {self.where}"


def state_of(activity: Activity, rank: int) -> RankState:
    """Return the state of this process, which is `rank`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = [f"{each.f_code.co_filename}:{each.f_lineno} in {each.f_code.co_name}" for each in _innermost(frame)]
    where = "/".join(calls[0].split("/")[-SHOWN_PARTS:]) if calls else "its end"
    in_collective = any(COLLECTIVES in call for call in calls)
    return RankState(
        rank,
        activity.advances,
        activity.phase,
        where,
        activity.waits,
        in_collective,
        list(activity.unfinished),
        work=activity.work,
    )


def _innermost(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


class Stillness:
    """Counts for how long the main thread of a rank has not advanced, in seconds of `poll_s` each poll."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._heard: RankState | None = None
        self._still_s = 0.0

    @property
    def state(self) -> RankState | None:
        """The state at the last heartbeat, with `still_s`. None before the first heartbeat."""
        return None if self._heard is None else msgspec.structs.replace(self._heard, still_s=self._still_s)

    def poll(self, heard: RankState | None) -> None:
        """Count one poll, at which the heartbeat `heard` came, or none."""
        self._still_s += self._poll_s
        if heard is None:
            return
        last, self._heard = self._heard, heard
        # A rank that has waited long for other ranks works again when their collective ends. The end of the collective
        # counts as an advance, although the rank may not have begun its next phase or collective.
        has_left = last is not None and last.in_collective and not heard.in_collective
        if last is None or last.advances != heard.advances or heard.waits or has_left:
            self._still_s = 0.0


class StuckFinder:
    """Finds a rank whose main thread has not advanced for `limit_s`. Each call of `find` counts as `poll_s` seconds."""

    def __init__(self, limit_s: float, poll_s: float) -> None:
        self._limit_s = limit_s
        self._poll_s = poll_s
        self._running: set[int] = set()
        self._since_end_s = 0.0

    def find(self, states: Sequence[RankState]) -> str | None:
        """Name the rank that is stuck, and describe the other ranks. Returns None if no rank is stuck. `states` are the
        states of the ranks that run.

        A rank is stuck if its work has not advanced for the limit. All ranks are stuck if they wait for each other that
        long, and no rank has ended in this time.
        """
        running = {each.rank for each in states}
        # The ranks that still run may have waited for the rank that has ended. Their last heartbeats may still report
        # this wait, although it is over: a process writes no heartbeats while it collects garbage.
        self._since_end_s = 0.0 if self._running - running else self._since_end_s + self._poll_s
        self._running = running
        stuck = [each for each in states if not each.waits and each.still_s >= each.limit_s(self._limit_s)]
        working = [each for each in stuck if not each.in_collective]
        all_wait = len(stuck) == len(states) and self._since_end_s >= self._limit_s
        if not stuck or not (working or all_wait):
            return None
        first = max(working or stuck, key=lambda each: each.still_s)
        others = "".join(f"; {each}" for each in states if each is not first)
        return f"{first}, and has not advanced for {first.still_s:.0f} s (learner.rank_timeout_s){others}"
