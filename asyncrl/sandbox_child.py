"""A script inside the sandbox's process group: it gives up what the program must not have, then runs it from stdin.

Arguments: CPU seconds, bytes of memory, bytes of a file. Only the standard library is used, and nothing of asyncrl.
A limit or namespace that this system does not offer is left out; see docs/writing_a_tool.md for what that means.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000


def die_with_parent(libc: ctypes.CDLL) -> None:
    with contextlib.suppress(AttributeError):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_namespaces(libc: ctypes.CDLL) -> None:
    """No network, and no sight of other processes' ids: all that the program starts dies with its first process."""
    with contextlib.suppress(AttributeError):
        for user in (CLONE_NEWUSER, 0):
            if libc.unshare(user | CLONE_NEWPID | CLONE_NEWNET) == 0:
                return


def set_limits(cpu_s: int, memory: int, file_size: int) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (value, value))


def main() -> None:
    libc = ctypes.CDLL(None)
    die_with_parent(libc)
    leave_namespaces(libc)
    child = os.fork()
    if child == 0:
        die_with_parent(libc)
        set_limits(*(int(argument) for argument in sys.argv[1:]))
        os.execv(sys.executable, [sys.executable, "-I", "-"])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
