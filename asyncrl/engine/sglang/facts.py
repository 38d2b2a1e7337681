"""Finds the facts about an SGLang server and this machine that decide by which route weights reach the server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from asyncrl.network.interfaces import address_towards
from asyncrl.weights.routes import ServerFacts

GPU_CHOICE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def facts_of(host: str, port: int, info: Mapping[str, Any], taken: Sequence[int] = ()) -> ServerFacts:
    """Compare a server's `/server_info` with the process that listens at its address, if that process is on this
    machine."""
    first, count = int(info.get("base_gpu_id") or 0), int(info.get("tp_size") or 1)
    gpus = range(first, first + count) if str(info.get("device")).startswith("cuda") else ()
    server = _listener(port) if _is_ours(host, port) else None
    same = server is not None and all(server.get(name) == os.environ.get(name) for name in GPU_CHOICE)
    return ServerFacts(server is not None, gpus, same, torch.cuda.device_count(), taken)


def _is_ours(host: str, port: int) -> bool:
    """True if `host` is this machine: then connections from here to `host` come from the address of `host`."""
    try:
        return socket.gethostbyname(host) == address_towards(host, port)
    except OSError:
        return False


def _listener(port: int) -> Mapping[str, str] | None:
    """The environment of the SGLang process that listens at a port of this machine.

    None if it cannot be seen: another user or a container runs it, or a tunnel listens at the port.
    """
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                command = " ".join([process.name(), *process.cmdline()])
                if "sglang" in command and _container(process.pid) == _container():
                    environment: Mapping[str, str] = process.environ()
                    return environment
    except (psutil.Error, OSError):
        # A process that this process is not allowed to inspect is treated like a server on another machine.
        return None
    return None


def _container(pid: int | str = "self") -> str:
    return str(Path(f"/proc/{pid}/ns/mnt").readlink())
