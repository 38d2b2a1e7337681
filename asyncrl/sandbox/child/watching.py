"""The watcher: waits until the program ends, and then ends all processes that the program has started."""

import os
import resource
import select
import signal
import time
from contextlib import suppress

from asyncrl.sandbox.child.options import FOLDER_PREFIX, Options
from asyncrl.sandbox.child.pausing import LOOK_S, RAN_IN_PAUSE, Pause, descendants
from asyncrl.sandbox.child.rights import confine

BEGUN = b"begun\n"
"""The line that the caller reads before the status of a program, unless the program ended before its first line."""
STOP, GO = b"s", b"g"
"""The orders that the caller of a session sends: stop all processes, or let them continue."""


def watch(options: Options) -> None:
    """Start the program, wait for its end, kill all its descendants, and exit. Returns only in the program's
    process."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # The kernel protects the first process of a namespace only from signals that have no handler. Python installs a
    # handler for SIGINT, so SIGINT is ignored explicitly.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake)
    problem, failure = os.pipe()
    program = os.fork()
    if program == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd in (woken, wake, problem):
            os.close(fd)
        confine(options, failure)
        return
    os.close(failure)
    try:
        status, reason = wait(program, woken, options)
    finally:
        if not options.namespaces:
            kill_descendants()
    failed = b""
    os.set_blocking(problem, False)
    with suppress(BlockingIOError):
        failed = os.read(problem, 4096)
    is_sent = report(options.control, b"failed " + failed if failed else f"status {status} {reason}".encode())
    if not is_sent and not options.namespaces:
        remove_folder()
    os._exit(0)


def report(control: int, text: bytes) -> bool:
    """Send a text to the caller. Returns false if the caller has ended or expects no more texts."""
    try:
        os.write(control, text)
    except OSError:
        return False
    return True


def remove_folder() -> None:
    """Remove the program's folder, in which this process still is. A caller that has ended cannot remove it."""
    import shutil  # This import takes milliseconds, and most watchers do not need it.

    # The program may have removed the folder.
    with suppress(FileNotFoundError):
        folder = os.getcwd()
        if os.path.basename(folder).startswith(FOLDER_PREFIX):  # Nothing else may ever be removed here.
            shutil.rmtree(folder, ignore_errors=True)


def wait(program: int, woken: int, options: Options) -> "tuple[int, str]":
    """Wait until `program` ends or must be killed. Returns its status, as in a shell, and a reason.

    The status is 128 + SIGKILL in three cases: the caller has ended; the processes are too many or take too much memory
    together; or they ran in a pause. A reason is returned only in the last case.
    """
    poll = select.poll()
    poll.register(options.control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    killed = 128 + signal.SIGKILL
    pause: Pause | None = None
    while True:
        status = reap(program)
        if status is not None:
            return status, ""
        ready = [fd for fd, _ in poll.poll(1000 * (LOOK_S if pause is None else pause.wait_s) + 1)]
        if options.control in ready:
            orders = received(options.control)
            if not orders:
                return killed, ""
            if pause is not None:
                pause.end()
            pause = Pause(options.proc) if orders.endswith(STOP) else None
        # Memory is checked only while processes run, because the memory of stopped processes does not grow.
        is_running = pause is None or pause.look()
        if pause is not None and pause.is_broken:
            return killed, RAN_IN_PAUSE
        if is_running and takes_too_much(options):
            return killed, ""
        if woken in ready:
            os.read(woken, 4096)


def received(control: int) -> bytes:
    """Return the caller's next orders. They are empty if the caller has ended."""
    # If the caller ended before it read BEGUN, the kernel reports a reset instead of the end of the connection.
    with suppress(ConnectionResetError):
        return os.read(control, 64)
    return b""


def takes_too_much(options: Options) -> bool:
    found = descendants(options.proc)
    if not options.kernel_counts and len(found) > options.processes:
        return True
    return sum(memory(f"{options.proc}/{pid}") for pid in found) > options.memory


def memory(process: str) -> int:
    """Return the bytes of memory that a process uses.

    Memory that several processes share is divided among them, if the kernel reports this share.
    """
    with suppress(OSError, ValueError):
        with suppress(PermissionError), open(f"{process}/smaps_rollup", "rb") as rollup:
            return int(rollup.read().partition(b"\nPss:")[2].split()[0]) << 10
        with open(f"{process}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    return 0


def reap(program: int) -> "int | None":
    """Reap all children that have ended. Returns the status of `program` if it is one of them."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if pid == 0:
                break
    return None


def kill_descendants() -> None:
    """Kill all descendants again and again until none is left, because they may start new processes meanwhile."""
    while True:
        for pid in descendants("/proc"):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)
