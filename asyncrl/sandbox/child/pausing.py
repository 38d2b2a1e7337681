"""Stops all processes of a session between two of its cells (pieces of code), and checks that they stay stopped.

A stopped process can be woken: a timer, a file, a dying parent or another process may send it SIGCONT. So the watcher
reads how long each thread has run, and ends a session that runs in a pause. This file imports only the standard
library, because a container gets only its text.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

RAN_IN_PAUSE = "the session was ended because its processes ran between two calls"
LOOK_S, LONGEST_LOOK_S = 0.1, 0.5
"""Until all processes have stopped, they are looked at every LOOK_S seconds. After that, the interval grows up to
LONGEST_LOOK_S seconds."""

MOST_RUNS = 5
"""The maximum number of looks that may find running processes before all have stopped. Stopping takes a while on a busy
machine. After all have stopped, it is the maximum number of looks that may find ended processes: between two looks, a
process may be woken, run and end.
"""

MOST_ROUNDS = 100
"""The maximum number of rounds in which a signal is sent to newly forked processes.

If processes fork faster than this, the next look notices that they have run.
"""

PF_EXITING = 4


class Pause:
    """Stops all processes that this process has started, and checks that they stay stopped.

    `proc` is the mount of procfs that lists them. `clock` returns seconds.
    """

    def __init__(self, proc: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._runs = 0
        self._ended: set[str] = set()
        self._settled = False
        self._broken = False
        self._every_s = LOOK_S
        signal_all(proc, signal.SIGSTOP)
        self._ran = run_times(proc)
        self._due = clock() + LOOK_S

    @property
    def wait_s(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._due - self._clock())

    @property
    def is_broken(self) -> bool:
        """True if the session ran although it was stopped."""
        return self._broken or self._runs > MOST_RUNS

    def look(self) -> bool:
        """Look at the processes if a look is due. Returns true if any has run since the last look."""
        if self.wait_s:
            return False
        before, self._ran = self._ran, run_times(self._proc)
        changed = {thread for thread, ran in self._ran.items() if ran != before.get(thread)}
        ended = {thread for thread in changed if is_exiting(thread)} | (before.keys() - self._ran.keys())
        has_run = not changed <= ended
        if self._settled:
            # A stopped process runs only if it was woken on purpose, but the kernel may kill one when memory is short.
            self._broken |= has_run
            self._runs += not ended <= self._ended
            self._every_s = min(2 * self._every_s, LONGEST_LOOK_S)
        elif has_run or not all(map(is_stopped, self._ran)):
            self._runs += has_run
            # A process may have sent SIGCONT to another one just before it was stopped.
            signal_all(self._proc, signal.SIGSTOP)
        else:
            self._settled, self._runs = True, 0
        self._ended |= ended
        self._due = self._clock() + self._every_s
        return has_run

    def end(self) -> None:
        """Let the processes continue."""
        signal_all(self._proc, signal.SIGCONT)


def signal_all(proc: str, number: int) -> None:
    """Send a signal to all processes that this process has started."""
    if os.getpid() == 1:
        # The id -1 reaches all other processes of the namespace, even those that are being forked.
        with suppress(ProcessLookupError):
            os.kill(-1, number)
        return
    reached: set[int] = set()
    for _ in range(MOST_ROUNDS):
        new = descendants(proc) - reached
        if not new:
            return
        for pid in new:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        reached |= new


def descendants(proc: str) -> set[int]:
    """Return the ids of the processes that this process has started, and of their descendants."""
    if not os.path.exists(f"{proc}/thread-self/children"):
        return _descendants_of_all(proc)
    found: set[int] = set()
    new = {os.getpid()}
    while new:
        new = {child for pid in new for child in _children(f"{proc}/{pid}/task")} - found
        found |= new
    return found


def _children(threads: str) -> set[int]:
    found: set[int] = set()
    with suppress(OSError):
        for thread in os.listdir(threads):
            found.update(map(int, _read(f"{threads}/{thread}/children").split()))
    return found


def _descendants_of_all(proc: str) -> set[int]:
    """Find the descendants among all processes of the machine, on kernels that list no children."""
    parents = {}
    for name in filter(str.isdigit, os.listdir(proc)):
        with suppress(OSError):
            parents[int(name)] = int(_stat(f"{proc}/{name}")[1])
    found, known = {os.getpid()}, 0
    while len(found) > known:
        known = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def run_times(proc: str) -> dict[str, bytes]:
    """Map each thread's folder in procfs to the thread's running time, as the kernel writes it."""
    times = {}
    for pid in descendants(proc):
        with suppress(OSError):
            for thread in os.listdir(f"{proc}/{pid}/task"):
                folder = f"{proc}/{pid}/task/{thread}"
                with suppress(OSError):
                    times[folder] = _run_time(folder)
    return times


def _run_time(thread: str) -> bytes:
    with suppress(FileNotFoundError):
        # `schedstat` has nanoseconds of running and waiting, and the number of time slices.
        found = _read(f"{thread}/schedstat")
        if found != b"0 0 0\n":
            return found
    # Kernels without these statistics count hundredths of seconds.
    return b" ".join(_stat(thread)[11:13])


def is_stopped(thread: str) -> bool:
    """True if a thread has stopped, or has ended."""
    with suppress(OSError):
        return _stat(thread)[0] in b"TtZX"
    return True


def is_exiting(thread: str) -> bool:
    """True if a thread has ended or is ending. Ending may take long, because the kernel frees the memory meanwhile."""
    with suppress(OSError):
        return bool(int(_stat(thread)[6]) & PF_EXITING)
    return True


def _stat(folder: str) -> list[bytes]:
    """Return the fields of a `stat` file from the state on: 0 is the state, 1 the parent, 6 the flags, 11 and 12 are
    times."""
    return _read(f"{folder}/stat").rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
