"""What every role's process needs: a name, a run folder, the addresses of the others, and a clean way to stop."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from types import FrameType

from asyncrl.config.schema import NetworkConfig, RunConfig
from asyncrl.types import RunIdentity

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_MMAP_THRESHOLD = 32 << 20
"""Of glibc's malloc.h, and the most that it takes."""
WORKER_VARIABLE = "ASYNCRL_WORKER"
IDENTITY = "identity"
"""The file in a run's folder that holds its id."""


def worker_name(kind: str) -> str:
    """This process's name: the supervisor's, which stays the same over restarts, or one made of host and process id."""
    return os.environ.get(WORKER_VARIABLE) or f"{kind}-{socket.gethostname()}-{os.getpid()}"


def incarnation() -> str:
    """A new name for this start of the process."""
    return uuid.uuid4().hex


def run_dir(config: RunConfig) -> Path:
    """The folder of the run: its store, checkpoints, logs and metrics."""
    return Path(config.dir) / config.name


def run_identity(config: RunConfig, make: bool = False) -> RunIdentity:
    """Which run this process belongs to. Its id is kept in the run's folder for good; with `make` it is made where
    there is none, by whichever process comes first. A process away from that folder knows the run's name only."""
    path = run_dir(config) / IDENTITY
    if make and not path.exists():
        _write_once(path, uuid.uuid4().hex)
    return RunIdentity(config.name, path.read_text().strip() if path.exists() else "")


def _write_once(path: Path, text: str) -> None:
    """Write a new file that is whole as soon as it is there; does nothing where another process was faster."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    with suppress(FileExistsError):
        path.hardlink_to(partial)
    partial.unlink()


def replay_endpoints(config: NetworkConfig, shards: int) -> list[str]:
    """The address of every shard of the replay."""
    return [f"tcp://{config.host}:{config.replay_port + shard}" for shard in range(shards)]


def weights_endpoint(config: NetworkConfig) -> str:
    return f"tcp://{config.host}:{config.weights_port}"


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
    """Have glibc keep up to `trim_bytes` of freed memory for what comes next: a process that handles messages of the
    same size again and again would otherwise get every page anew. Does nothing under another C library."""
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
