"""Runs the launcher, and later the program in its confined process.

The program's process writes BEGUN to the control socket just before its first line. When that process has ended, the
watcher writes `status N REASON`, or `failed REASON` if the process could not be confined. For a session the watcher
also reads orders from this socket. The watcher ends when the caller closes the connection.

`machine/guard.py`, which ends other child processes with their parent, is not used here: the watcher (`watching.py`)
ends the program when the caller ends.
"""

import os
import signal
import sys
from contextlib import suppress

from asyncrl.sandbox.child.namespaces import build_root, enter_namespaces
from asyncrl.sandbox.child.options import Options
from asyncrl.sandbox.child.system import libc
from asyncrl.sandbox.child.watching import BEGUN, report, watch

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    ignore_signals()
    options = Options(sys.argv[1:])
    source = os.pread(options.source, os.fstat(options.source).st_size, 0).decode()
    os.close(options.source)
    launch(options)
    find_packages()
    report(options.control, BEGUN)
    os.close(options.control)
    run(source)


def ignore_signals() -> None:
    """Ignore the signals with which Slurm stops or drains a role, because the role's children get them, too."""
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)


def launch(options: Options) -> None:
    """Start the watcher and the program's process. Returns only in the program's process, after it was confined."""
    try:
        if options.namespaces:
            enter_namespaces(options.users is not None)
            watcher = os.fork()
            if watcher:
                os.waitpid(watcher, 0)
                os._exit(0)
            build_root(options)
        else:
            with suppress(AttributeError):
                libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        watch(options)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        report(options.control, f"failed {type(error).__name__}: {error}".encode())
        os._exit(1)


def find_packages() -> None:
    """Change the import path: the program finds the packages of this Python, and does not find the files of asyncrl."""
    import site

    del sys.path[0]
    site.main()
    sys.argv[:] = ["-"]


def run(source: str) -> None:
    """Run a program as `python -I -` does. Its tracebacks have no frames of this package."""
    sys.modules["__main__"] = module = type(sys)("__main__")
    try:
        exec(compile(source, "<stdin>", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - printed, as Python does
        frames = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(1)
