"""The program through which this package starts each child that must end with its parent, however the parent ends.

The program becomes COMMAND in the same process:

- `guard.py signal NUMBER PARENT CPUS COMMAND ...`: the kernel sends COMMAND the signal NUMBER when the thread that
  started it ends. This is for programs that end their own children: the roles and the ranks.
- `guard.py kill WATCHED COMMAND ...`: COMMAND leads a group of processes. A guard outside of that group kills the group
  when the other side of the pipe with the descriptor WATCHED is closed. The starter holds that side, so the kernel
  closes it when the starter ends. This is for programs that do not end their children: servers, agents, tools,
  containers.

The guard also kills processes that COMMAND started in other groups. It knows these processes by a mark in their
environment. It stays until the last of them has ended, and keeps its inherited files open. So a lock on GPUs lasts as
long as any such process may have memory on them.

This file imports no other file of asyncrl, since COMMAND may run in another Python environment. A program that a policy
wrote has another guard, `sandbox/child/watching.py`, which also confines it.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

POLL_S = 0.02
KILLED_S = 30.0
"""The longest wait for processes that were killed: a process that hangs in the kernel may never end."""

VARIABLE = "ASYNCRL_GUARDED"
"""A variable in COMMAND's environment: the marks of its guard, and of the guards of the programs that started it."""

PR_SET_PDEATHSIG = 1
STATE, GROUP, THREADS = 0, 2, 17
"""The indices of three fields of /proc/PID/stat, counted from the field after the name of the program."""


def main() -> None:
    match sys.argv[1:]:
        case ["signal", number, parent, cpus, *command]:
            be_signalled(int(number), int(parent))
            bind([int(each) for each in cpus.split(",") if each])
            become(command)
        case ["kill", watched, *command]:
            be_guarded(int(watched))
            become(command)
        case other:
            sys.exit(f"guard.py {' '.join(other)}: name signal or kill, and a command")


def become(command: list[str]) -> NoReturn:
    """Run `command` in this process."""
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and the program would inherit that.
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def be_signalled(number: int, parent: int) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    import ctypes  # Only this mode needs it.

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    # The kernel does not notice a parent that ended before the call.
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def bind(cpus: list[int]) -> None:
    """Run on `cpus` alone. If there are none, or this process may no longer use them, run anywhere."""
    with suppress(OSError):
        if cpus:
            os.sched_setaffinity(0, cpus)


def be_guarded(watched: int) -> None:
    """Start a guard that kills the group of this process when `watched` ends. If `watched` is standard input, the
    program reads from /dev/null."""
    # Slurm asks a role to stop by these signals, and sends them to the role's children, too. The children must not end
    # by them.
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    mark = os.urandom(16).hex()
    leave_guard(os.getpid(), mark, watched)
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '')} {mark}"
    if watched == 0:
        read_nothing(0)
    else:
        os.close(watched)


def read_nothing(*files: int) -> None:
    """Connect descriptors to /dev/null."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in files:
        os.dup2(nothing, each)
    os.close(nothing)


def leave_guard(group: int, mark: str, watched: int) -> None:
    """Start a guard that is neither in the group nor a child of this process, so that it is not killed with them."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork() == 0:
        # The guard must not keep the program's pipes open.
        read_nothing(*({0, 1, 2} - {watched}))
        guard(group, mark, watched)
    os._exit(0)


def guard(group: int, mark: str, watched: int) -> None:
    """Wait for the end of `watched`. Then kill the group and all processes with the mark, and return once they have
    ended."""
    # The guard must outlive these signals: a scheduler sends them to all processes of a job when the job ends, while
    # the parent still runs.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    while os.read(watched, 1 << 12):
        pass
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    end = time.monotonic() + KILLED_S
    # The kill is repeated, since a process may have started another one just before it was killed.
    while (kill_marked(mark) or runs(group)) and time.monotonic() < end:
        time.sleep(POLL_S)


def kill_marked(mark: str) -> bool:
    """Kill the processes that started with the mark in their environment. Returns True if there were any."""
    found = list(marked(mark.encode()))
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def marked(mark: bytes) -> Iterator[int]:
    """Yield the ids of the processes that started with the mark in their environment."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # The process has ended, or belongs to another user.
            if mark in file.read_bytes():
                yield int(file.parent.name)


def runs(group: int) -> bool:
    """True if a process of the group runs. A zombie counts as ended if all of its threads have ended."""
    if not Path("/proc/self/stat").exists():
        return False  # The wait is only for GPUs, which are used only on Linux.
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # It has ended.
        if int(fields[GROUP]) == group and (fields[STATE] not in "ZX" or int(fields[THREADS]) > 1):
            return True
    return False


if __name__ == "__main__":
    main()
