"""Finds out how busy one of the actor's own servers is, from the newest lines of its log and from its scheduler.

SGLang logs a line after every few steps of decoding, such as `Decode batch, #running-req: 190, #token: 62431, token
usage: 0.09, cuda graph: True, gen throughput (token/s): 12360.41, #queue-req: 0`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

NEWEST_BYTES = 1 << 16
"""A look reads at most this many bytes at the end of a log. If the log grew by more since the last look, the rest is
skipped."""
DECODE = re.compile(rb"Decode batch.*?cuda graph: (True|False).*?#queue-req: (\d+)")
SCHEDULER = "sglang::schedul"
"""The beginning of the name of a scheduler's process. Linux cuts names to this length."""


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of one server.

    - `graphs`: the newest batch was decoded with a CUDA graph; None: nothing was decoded yet.
    - `queued`: the number of waiting requests in the newest line of the log; 0: no new line since the last look.
    - `scheduler`: the share of a core that the busiest scheduler took since the last look; None: unknown.
    """

    graphs: bool | None = None
    queued: int = 0
    scheduler: float | None = None


class LoadWatch:
    """Looks at the server whose output is in `log`. `process` gives the id of its first process, or None if it does not
    run. `clock` gives seconds."""

    def __init__(self, log: Path, process: Callable[[], int | None], clock: Callable[[], float]) -> None:
        self._log = log
        self._process = process
        self._clock = clock
        self._position = 0
        self._graphs: bool | None = None
        self._root: int | None = None
        self._schedulers: list[psutil.Process] = []
        self._used: dict[int, float] = {}
        self._looked = clock()

    def look(self) -> ServerLoad:
        """The load since the last call."""
        found = DECODE.findall(self._new_lines())
        if found:
            self._graphs = found[-1][0] == b"True"
        return ServerLoad(self._graphs, int(found[-1][1]) if found else 0, self._scheduler())

    def _new_lines(self) -> bytes:
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, 2)
                # A server that starts again may begin a new log.
                begin = self._position if self._position <= size else 0
                file.seek(max(begin, size - NEWEST_BYTES))
                self._position = size
                return file.read(NEWEST_BYTES)
        except OSError:
            return b""

    def _scheduler(self) -> float | None:
        before, used, since = self._looked, self._used, self._used_now()
        self._looked, self._used = self._clock(), since
        seconds = self._looked - before
        grown = [value - used[pid] for pid, value in since.items() if pid in used]
        return max(grown) / seconds if grown and seconds > 0 else None

    def _used_now(self) -> dict[int, float]:
        """The processor time in seconds that each scheduler has used."""
        root = self._process()
        if root is None:
            return {}
        try:
            if root != self._root or not self._schedulers:
                # The schedulers start some time after the server. Looking for them takes longer than asking them.
                every = psutil.Process(root).children(recursive=True)
                self._root, self._schedulers = root, [each for each in every if each.name().startswith(SCHEDULER)]
            return {each.pid: sum(each.cpu_times()[:2]) for each in self._schedulers}
        except psutil.Error:
            self._schedulers = []
            return {}


def load_counters(loads: Iterable[ServerLoad]) -> Mapping[str, float]:
    """The gauges of an actor's servers."""
    every = list(loads)
    busy = [load.scheduler for load in every if load.scheduler is not None]
    return {
        "servers_without_graphs": sum(load.graphs is False for load in every),
        "servers_queued": sum(load.queued for load in every),
        **({"scheduler_busy": max(busy)} if busy else {}),
    }
