"""Stopping all processes of a session between two cells, and checking that they stay stopped.

SIGSTOP alone does not keep a process from running: a timer, a file, a dying parent or another process may send it
SIGCONT. So the watcher reads how long each thread has run, and ends a session that runs in a pause. This file imports
the standard library alone: a container gets only its text.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

RAN_IN_PAUSE = "the session was ended because its processes ran between two calls"
LOOK_S, LONGEST_LOOK_S = 0.1, 0.5
"""Seconds between two looks: until all processes have stopped, and the most from then on."""

MOST_RUNS = 5
"""The most looks at which processes may have run before all have stopped: on a busy machine a stop takes a while.

After that, the most looks at which some may have ended: a process that was woken may run and end between two looks.
"""

MOST_ROUNDS = 100
"""The most rounds in which a signal is sent to processes that were forked meanwhile.

A process that forks faster has run, which the next look notices.
"""

PF_EXITING = 4


class Pause:
    """Stops all processes that this process has started, and checks that they stay stopped.

    `proc` is the folder in which it finds them. `clock` gives seconds.
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
        """True if the session runs although it was stopped."""
        return self._broken or self._runs > MOST_RUNS

    def look(self) -> bool:
        """Look at the processes, if it is time. True if any has run since the last look."""
        if self.wait_s:
            return False
        before, self._ran = self._ran, run_times(self._proc)
        changed = {thread for thread, ran in self._ran.items() if ran != before.get(thread)}
        ended = {thread for thread in changed if is_exiting(thread)} | (before.keys() - self._ran.keys())
        has_run = not changed <= ended
        if self._settled:
            # A stopped process that runs was woken on purpose. But the kernel may end one if memory is short.
            self._broken |= has_run
            self._runs += not ended <= self._ended
            self._every_s = min(2 * self._every_s, LONGEST_LOOK_S)
        elif has_run or not all(map(is_stopped, self._ran)):
            self._runs += has_run
            # A process may have sent SIGCONT to another one just before it stopped itself.
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
        # This reaches all processes of the namespace but this one, also those that are just forked.
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
    """The processes that this process has started, and their descendants."""
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
    """The descendants on kernels without the files of children: a look at all processes of the machine."""
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
    """The time that each thread has run, as the kernel's text, by the thread's folder."""
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
        # Nanoseconds, and the number of times that it got a processor.
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
    """True if a thread has ended, or is ending: to free its memory may take long."""
    with suppress(OSError):
        return bool(int(_stat(thread)[6]) & PF_EXITING)
    return True


def _stat(folder: str) -> list[bytes]:
    """The fields of a process or a thread from its state on: 1 is the parent, 6 are flags, 11 and 12 are times."""
    return _read(f"{folder}/stat").rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
