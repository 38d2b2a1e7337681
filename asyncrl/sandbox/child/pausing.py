"""Stopping all processes of a session between two cells, and checking that they stay stopped.

SIGSTOP alone does not keep a process from running: a timer, a file, a dying parent or another process may send it
SIGCONT. So the watcher reads how long each thread has run, and ends a session that runs in a pause. Standard library
only, and nothing of this package: a container gets the text of this file alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

RAN_IN_PAUSE = "the session was ended because its processes ran between two calls"
LOOK_S, LONGEST_LOOK_S = 0.1, 0.5
"""Between two looks: until all processes have stopped, and the most from then on."""

MOST_RUNS = 5
"""The looks at which processes may have run before all have stopped: on a busy machine each must first get its turn at
a processor. From then on, the looks at which some may have ended: one that was woken may run and end between two."""

MOST_ROUNDS = 100
"""In which a signal is sent to what processes have started meanwhile. Who forks faster has run, for the next look."""

PF_EXITING = 4


class Pause:
    """Stops all processes that this process has started. `proc` is the folder in which it finds them, and `clock` gives
    seconds."""

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
        """True if the session runs although it was stopped."""
        return self._broken or self._runs > MOST_RUNS

    def look(self) -> bool:
        """True if any process has run since the last look. False where the time for another look has not come."""
        if self.wait_s:
            return False
        before, self._ran = self._ran, run_times(self._proc)
        changed = {thread for thread, ran in self._ran.items() if ran != before.get(thread)}
        ended = {thread for thread in changed if is_exiting(thread)} | (before.keys() - self._ran.keys())
        has_run = not changed <= ended
        if self._settled:
            # Nothing innocent wakes a process that has stopped. The kernel may end one where memory is short.
            self._broken |= has_run
            self._runs += not ended <= self._ended
            self._every_s = min(2 * self._every_s, LONGEST_LOOK_S)
        elif has_run or not all(map(is_stopped, self._ran)):
            self._runs += has_run
            # Another process may have sent it SIGCONT just before that one stopped.
            signal_all(self._proc, signal.SIGSTOP)
        else:
            self._settled, self._runs = True, 0
        self._ended |= ended
        self._due = self._clock() + self._every_s
        return has_run

    def end(self) -> None:
        """Let the processes go on."""
        signal_all(self._proc, signal.SIGCONT)


def signal_all(proc: str, number: int) -> None:
    """Send a signal to all processes that this process has started."""
    if os.getpid() == 1:
        # All processes of the namespace but this one, also those that are being forked.
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
    """The processes that this process has started, and those that they have."""
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
    """The same for kernels without the files of children, by a look at all processes of the machine."""
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
    """By the folder of each thread: how long it has run, in the words of the kernel."""
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
        # Nanoseconds, and how often it got a processor.
        found = _read(f"{thread}/schedstat")
        if found != b"0 0 0\n":
            return found
    # Hundredths of seconds, for kernels that count no better.
    return b" ".join(_stat(thread)[11:13])


def is_stopped(thread: str) -> bool:
    """True if a thread has stopped, or has ended."""
    with suppress(OSError):
        return _stat(thread)[0] in b"TtZX"
    return True


def is_exiting(thread: str) -> bool:
    """True if a thread has ended, or only gives back its memory yet, which may take long."""
    with suppress(OSError):
        return bool(int(_stat(thread)[6]) & PF_EXITING)
    return True


def _stat(folder: str) -> list[bytes]:
    """The state of a process or a thread, and what follows it: 1 is the parent, 6 are flags, 11 and 12 are times."""
    return _read(f"{folder}/stat").rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
