"""The launcher, and what the program's process does once it is confined.

A program of a policy does not start by `machine/guard.py`: its watcher (`watching.py`) confines it, and ends it with
its caller.

On the control socket the watcher reports `status N` or `failed REASON`, and reads only that the caller has closed it.
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
    """Slurm sends these, by which it asks a role to stop or to drain, to the role's children, too."""
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
    """Let imports find the packages of this Python, and the caller's path to this one no longer."""
    import site

    del sys.path[0]
    site.main()
    sys.argv[:] = ["-"]


def run(source: str) -> None:
    """Run as `python -I -` does: a failure is printed without the frames of this package."""
    find_packages()
    sys.modules["__main__"] = module = type(sys)("__main__")
    try:
        exec(compile(source, "<stdin>", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - printed, as Python does
        behind = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(behind), behind)
        sys.exit(1)
