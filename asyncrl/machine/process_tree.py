"""Measures the processor time and the memory of this process and of its children."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

CHILDREN_S = 10.0
"""The time between two searches for children. A search reads all processes of the machine, perhaps thousands."""


class HostUse(NamedTuple):
    """Processor seconds so far, and resident bytes now. Pages that several processes share count once for each
    process."""

    cpu_s: float
    resident: int


class ProcessTree:
    """A process, by default the current process, with its children, their children, and so on. The list of these
    processes is renewed every CHILDREN_S seconds. `clock` gives seconds.
    """

    def __init__(self, pid: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = psutil.Process(pid)
        self._clock = clock
        self._children: list[psutil.Process] = []
        self._next = clock()

    def read(self) -> HostUse:
        """Return the total use of all these processes now. Raises psutil.Error: the process itself has ended."""
        if self._clock() >= self._next:
            self._next = self._clock() + CHILDREN_S
            self._children = self._root.children(recursive=True)
        own = _read(self._root)
        others = [use for child in self._children if (use := _read_other(child)) is not None]
        return HostUse(*map(sum, zip(own, *others, strict=True)))


def _read(process: psutil.Process) -> HostUse:
    with process.oneshot():
        # Includes the seconds of its children that have ended.
        return HostUse(sum(process.cpu_times()[:4]), process.memory_info().rss)


def _read_other(process: psutil.Process) -> HostUse | None:
    try:
        return _read(process)
    except psutil.Error:  # It has just ended: its seconds now count for its parent.
        return None
