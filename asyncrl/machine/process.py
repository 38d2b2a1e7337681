"""What every role's process needs of its machine: a name, a clean way to stop, memory and threads."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
import uuid
from types import FrameType

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_MMAP_THRESHOLD = 32 << 20
"""From glibc's malloc.h: the names of two settings, and the largest value of the second."""
STOP_S = 12.0
"""A supervised process that has not ended so long after a SIGTERM is killed. A clean stop takes a second or two."""
WORKER_VARIABLE = "ASYNCRL_WORKER"
"""The environment variable in which the supervisor passes a process its name."""


def worker_name(kind: str) -> str:
    """This process's name: the one that the supervisor gave it, which survives restarts, or host and process id."""
    return os.environ.get(WORKER_VARIABLE) or f"{kind}-{socket.gethostname()}-{os.getpid()}"


def is_supervised() -> bool:
    """Whether a supervisor started this process, which then ends it too."""
    return WORKER_VARIABLE in os.environ


def incarnation() -> str:
    """A new name for this start of the process."""
    return uuid.uuid4().hex


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM and Ctrl-C set. A second Ctrl-C ends the process at once."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        log.info("stopping on %s", signal.Signals(number).name)
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    return stop


def keep_freed_memory(trim_bytes: int = 64 << 20) -> None:
    """Have glibc keep up to `trim_bytes` of freed memory for later use.

    A process that handles many messages of one size would otherwise return their pages to the kernel and fetch them
    again. Does nothing under another C library.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, trim_bytes)


def limit_threads(threads: int) -> None:
    """Give torch `threads` threads that sleep while they wait: spinning ones starve the other roles of a small machine.

    Must be called before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
