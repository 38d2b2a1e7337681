"""The process of a role: its name, a clean way to stop, memory and threads."""

from __future__ import annotations

import _thread
import ctypes
import gc
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_MMAP_THRESHOLD = 32 << 20
"""Two settings of glibc's malloc.h, and the largest value of M_MMAP_THRESHOLD."""
STOP_S = 12.0
"""A supervised process is killed if it has not ended this long after a SIGTERM. A clean stop takes a second or two."""
STOP_OF_STEP = signal.SIGUSR1
"""The signal that asks a process to stop under srun. On SIGTERM, srun would kill the process."""
COLLECT_AFTER = 50_000
"""The number of new objects after which an actor looks for garbage among them. Python's default is 700."""
DRAIN = signal.SIGUSR2
"""The signal that asks a process to finish its present work and to end."""
AGAIN_S = 0.1
"""A Ctrl-C that comes sooner than this after the first signal is ignored. `timeout -s INT` sends SIGINT to its
command, and at once to the command's process group."""
SHOW_CURSOR = b"\x1b[?25h"
"""The escape sequence that shows a terminal's cursor again after a live table has hidden it."""
WORKER_VARIABLE = "ASYNCRL_WORKER"
"""The environment variable in which the supervisor passes a process its name."""


def worker_name(kind: str) -> str:
    """Return this process's name. The supervisor gives it, and it stays the same after restarts. Without a supervisor
    the name is made of host and process id."""
    return os.environ.get(WORKER_VARIABLE) or f"{kind}-{socket.gethostname()}-{os.getpid()}"


def is_supervised() -> bool:
    """True if a supervisor started this process. The supervisor ends it, too."""
    return WORKER_VARIABLE in os.environ


def incarnation() -> str:
    """Return a random name. A process makes one at its start, so that the replay can tell this process from an earlier
    one with the same `worker_name`."""
    return uuid.uuid4().hex


def stop_on_signals(now: Callable[[], float] = time.monotonic) -> threading.Event:
    """Return an event that SIGTERM, STOP_OF_STEP and Ctrl-C set. If one of these signals has come, a Ctrl-C at least
    AGAIN_S later ends the process at once."""
    stop, asked_at = threading.Event(), list[float]()

    def handle(number: int, frame: FrameType | None) -> None:
        if asked_at and number == signal.SIGINT:
            if now() - asked_at[0] < AGAIN_S:
                return
            # This exit does not wait for running work. Child processes end with this process, or are asked to end.
            shown = SHOW_CURSOR if os.isatty(2) else b""
            try:
                os.write(2, shown + b"asyncrl: ended at once on Ctrl-C, while it was stopping\n")
            finally:  # The write fails if the terminal or the pipe is closed.
                os._exit(128 + signal.SIGINT)
        asked_at.append(now())
        log.info("stopping on %s", signal.Signals(number).name)
        set_in_handler(stop)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    signal.signal(STOP_OF_STEP, handle)
    return stop


@contextmanager
def stopped_by_ctrl_c(stop: threading.Event, now: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """During the block, Ctrl-C sets `stop`, and does not interrupt this thread. Raises KeyboardInterrupt after the
    block if there was a Ctrl-C, or at once on a second one, AGAIN_S or more after the first. Does nothing if Ctrl-C
    raises no KeyboardInterrupt here: outside of the main thread, or under another handler of SIGINT."""
    asked_at = list[float]()

    def handle(number: int, frame: FrameType | None) -> None:
        if not asked_at:
            asked_at.append(now())
            set_in_handler(stop)
        elif now() - asked_at[0] >= AGAIN_S:
            raise KeyboardInterrupt

    if not _ctrl_c_raises():
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if asked_at:
            raise KeyboardInterrupt


def is_ctrl_c(error: BaseException) -> bool:
    """True if Ctrl-C may have raised `error` in this thread. Otherwise a user's code has raised it."""
    return _ctrl_c_raises() and isinstance(error, KeyboardInterrupt)


def _ctrl_c_raises() -> bool:
    # Roles and `asyncio.run` handle SIGINT in other ways. There, only code raises KeyboardInterrupt.
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def set_at_once(event: threading.Event) -> None:
    """Have a thread set `event` as soon as a signal of `stop_on_signals` arrives. Python itself handles a signal only
    once the main thread returns from a call into C. Call this in the main thread."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def watch() -> None:
        while not {signal.SIGTERM, signal.SIGINT, STOP_OF_STEP} & set(os.read(woken, 1)):
            pass
        event.set()

    threading.Thread(target=watch, name="signals", daemon=True).start()


def event_on(number: signal.Signals) -> threading.Event:
    """Return an event that a signal sets."""
    event = threading.Event()
    signal.signal(number, lambda *_: set_in_handler(event))
    return event


def set_in_handler(event: threading.Event) -> None:
    """Have another thread set `event`, on behalf of the handler of a signal. The main thread, which runs the handler,
    may be within `event.wait` and hold the event's lock. Then `event.set` would wait for this lock for ever."""
    try:
        _thread.start_new_thread(event.set, ())
    except RuntimeError:  # The interpreter ends: there are no more threads.
        event.set()


def keep_freed_memory(trim_bytes: int = 64 << 20) -> None:
    """Have glibc keep up to `trim_bytes` of freed memory for later use.

    A process that handles many messages of one size would otherwise return their pages to the kernel and fetch them
    again. Does nothing under another C library.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, trim_bytes)


def collect_rarely() -> None:
    """Look for garbage less often than Python does by default. Call this in a process with hundreds of small tasks at
    once, whose objects would all be visited many times a second."""
    gc.set_threshold(COLLECT_AFTER, 20, 50)


def freeze_heap() -> None:
    """Exclude all objects that exist now from garbage collections. Call this once everything is loaded: the modules of
    torch and transformers alone have hundreds of thousands of objects, and every collection would visit them again."""
    gc.collect()
    gc.freeze()


def set_thread_variables(threads: int) -> None:
    """Set the environment variables that give torch `threads` threads, which sleep while they wait. Torch must be
    imported after this. Spinning threads would starve the other roles of a small machine."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(threads)


def limit_threads(threads: int | None) -> None:
    """Import torch with `threads` threads, as `set_thread_variables` describes.

    If `threads` is None, torch gets the number in OMP_NUM_THREADS, which a launcher sets, or one thread. Call this
    before torch is imported.
    """
    # OpenMP takes one number for each level of nested regions, such as 4,2. The first is that of the outermost level.
    threads = threads or int((os.environ.get("OMP_NUM_THREADS") or "1").split(",")[0])
    set_thread_variables(threads)
    import torch

    torch.set_num_threads(threads)
