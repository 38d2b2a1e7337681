"""What every role's process needs: a name, a run folder, the addresses of the others, and a clean way to stop."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import uuid
from pathlib import Path
from types import FrameType

from asyncrl.config.schema import NetworkConfig, RunConfig

log = logging.getLogger(__name__)

WORKER_VARIABLE = "ASYNCRL_WORKER"


def worker_name(kind: str) -> str:
    """This process's name: the supervisor's, which stays the same over restarts, or one made of host and process id."""
    return os.environ.get(WORKER_VARIABLE) or f"{kind}-{socket.gethostname()}-{os.getpid()}"


def incarnation() -> str:
    """A new name for this start of the process."""
    return uuid.uuid4().hex


def run_dir(config: RunConfig) -> Path:
    """The folder of the run: its store, checkpoints, logs and metrics."""
    return Path(config.dir) / config.name


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


def limit_threads(threads: int) -> None:
    """Give torch `threads` threads that sleep while they wait: spinning ones starve the other roles of a small machine.

    Must be called before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
