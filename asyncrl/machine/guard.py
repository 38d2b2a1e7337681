"""Run as a program, `guard.py INPUT COMMAND ...` becomes COMMAND, which reads the descriptor INPUT, or nothing if that
is -. COMMAND leads its group of processes, and leaves a guard.

The guard is outside of that group. As soon as its input ends, because whoever started both has closed it or has died,
it kills the group, and what COMMAND has started in other groups. It knows these by a mark in their environment. Then it
stays until the last of them has ended. So the files that it has inherited, such as a lock on GPUs, are held for as long
as one of these processes may have memory there: a program's own children seldom inherit files.

It imports nothing of asyncrl, since the program may be another Python's and have an environment of its own.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

POLL_S = 0.02
KILLED_S = 30.0
"""For the group to end once it was killed: a process that hangs in the kernel may never do so."""

VARIABLE = "ASYNCRL_GUARDED"
"""Of COMMAND's environment: the marks of its guard and of those around it, which kill what is inside, too."""

STATE, GROUP, THREADS = 0, 2, 17
"""Fields of /proc/PID/stat behind the name of the program."""


def main() -> None:
    # Slurm sends these, by which it asks a role to stop, to the role's children, too.
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    given, *command = sys.argv[1:]
    mark = os.urandom(16).hex()
    leave_guard(os.getpid(), mark)
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '')} {mark}"
    source = os.open(os.devnull, os.O_RDONLY) if given == "-" else int(given)
    os.dup2(source, 0)
    os.close(source)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # By Python, and then by the program too.
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def leave_guard(group: int, mark: str) -> None:
    """Have a process that is neither of the group nor a child of this one, so that nobody kills it with these."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork() == 0:
        guard(group, mark)
    os._exit(0)


def guard(group: int, mark: str) -> None:
    """Wait for the end of the input; then kill the group and all that has the mark, and return once they have ended."""
    while os.read(0, 1 << 12):
        pass
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    end = time.monotonic() + KILLED_S
    # What is killed may have started another one just before.
    while (kill_marked(mark) or runs(group)) and time.monotonic() < end:
        time.sleep(POLL_S)


def kill_marked(mark: str) -> bool:
    """Kill the processes that started with the mark in their environment; whether there were any."""
    found = list(marked(mark.encode()))
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def marked(mark: bytes) -> Iterator[int]:
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # It has ended, or is another user's.
            if mark in file.read_bytes():
                yield int(file.parent.name)


def runs(group: int) -> bool:
    """Whether a process of the group runs. One whose end nobody has asked for yet has ended if its threads have."""
    if not Path("/proc/self/stat").exists():
        return False  # The kernel is not Linux, and so has none of the GPUs that this is for.
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
