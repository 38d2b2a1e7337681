"""The launcher, and the program's process once it is confined.

On the control socket the watcher writes `status N` or `failed REASON`. It reads orders for a session, and the end of
the connection when the caller closes it.

A program of a policy does not start by `machine/guard.py`: its watcher (`watching.py`) confines it, and ends it with
its caller.
"""

import os
import signal
import sys
from contextlib import suppress

from asyncrl.sandbox.child.namespaces import build_root, enter_namespaces
from asyncrl.sandbox.child.options import Options
from asyncrl.sandbox.child.system import libc
from asyncrl.sandbox.child.watching import watch

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    ignore_signals()
    options = Options(sys.argv[1:])
    source = os.pread(options.source, os.fstat(options.source).st_size, 0).decode()
    os.close(options.source)
    launch(options)
    run(source)


def ignore_signals() -> None:
    """Ignore the signals by which Slurm makes a role stop or drain: the role's children get them, too."""
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)


def launch(options: Options) -> None:
    """Start the watcher and the program's process. Returns only in the latter, once it is confined."""
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
        os.write(options.control, f"failed {type(error).__name__}: {error}".encode())
        os._exit(1)


def find_packages() -> None:
    """Let imports find the packages of this Python, but no longer the ones on the caller's path."""
    import site

    del sys.path[0]
    site.main()
    sys.argv[:] = ["-"]


def run(source: str) -> None:
    """Run a program as `python -I -` does: the traceback of a failure has no frames of this package."""
    find_packages()
    sys.modules["__main__"] = module = type(sys)("__main__")
    try:
        exec(compile(source, "<stdin>", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - printed, as Python does
        frames = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(1)
