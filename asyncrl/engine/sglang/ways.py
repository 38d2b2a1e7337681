"""The ways of weights into an SGLang server: one table, fastest first.

With `weights.into_servers=auto` a server that joins is examined, and gets weights by the first way that works for it
and this machine and cannot hang. If the server refuses that way, the next one is taken. Any other value names the only
way.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from asyncrl.engine.fleet.update import CPU
from asyncrl.engine.sglang.transports.base import DiskTransport, ServerEnd, Transport
from asyncrl.engine.sglang.transports.distributed import DistributedTransport
from asyncrl.engine.sglang.transports.ipc import IpcTransport
from asyncrl.network.interfaces import address_towards

AUTO = "auto"
GPU_BUCKET_BYTES = 512 << 20
"""A bucket costs a server some milliseconds, in which a GPU copies as much."""

GPU_RESERVE_BYTES = 4 << 30
"""What `auto` leaves free on a server's GPU for its activations."""

GPU_CHOICE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known of a server and of this machine before the first update.

    `here`: a process that this one can see, in the same container, serves at the url. `gpus`: the numbers of the
    server's GPUs, none on the CPU. `same_gpus`: the server and this process number GPUs alike. `visible`: how many GPUs
    this process sees. `taken`: GPUs of this machine that have a server.
    """

    here: bool = False
    gpus: Sequence[int] = ()
    same_gpus: bool = False
    visible: int = 0
    taken: Sequence[int] = ()

    @property
    def shared_gpu(self) -> torch.device | None:
        """The server's first GPU, where this process can use it, too."""
        usable = self.here and self.gpus and self.same_gpus and self.gpus[0] < self.visible
        return torch.device("cuda", self.gpus[0]) if usable else None

    @property
    def spare_gpu(self) -> torch.device | None:
        """The last GPU here without a server: the learner's are the first ones."""
        free = set(range(self.visible)) - {*self.taken, *(self.gpus if self.here else ())}
        return torch.device("cuda", max(free)) if free else None


@dataclass(frozen=True, slots=True)
class WaySettings:
    """What the configuration says of transports: `wanted` is `weights.into_servers`."""

    wanted: str = AUTO
    bucket_bytes: int = 64 << 20
    timeout_s: float = 30.0
    insecure: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """One way into a server.

    `obstacle` says why it does not work ("" if it works), `risk` why `auto` does not take it although it works.
    """

    name: str
    make: Callable[[ServerEnd, ServerFacts, WaySettings], Transport]
    obstacle: Callable[[ServerFacts], str] = lambda facts: ""
    risk: Callable[[ServerFacts], str] = lambda facts: ""


def _ipc(end: ServerEnd, facts: ServerFacts, settings: WaySettings) -> Transport:
    assert facts.shared_gpu is not None
    reserve = GPU_RESERVE_BYTES if settings.wanted == AUTO else 0
    return IpcTransport(end, facts.shared_gpu, GPU_BUCKET_BYTES, reserve)


def _nccl(end: ServerEnd, facts: ServerFacts, settings: WaySettings) -> Transport:
    assert facts.spare_gpu is not None
    return DistributedTransport(end, facts.spare_gpu, GPU_BUCKET_BYTES, settings.timeout_s, settings.insecure)


def _gloo(end: ServerEnd, facts: ServerFacts, settings: WaySettings) -> Transport:
    return DistributedTransport(end, CPU, settings.bucket_bytes, settings.timeout_s, settings.insecure)


def _no_shared_gpu(facts: ServerFacts) -> str:
    if not facts.gpus:
        return "the server runs on the CPU"
    if not facts.here:
        return "this process cannot see the server's process on this machine"
    return "" if facts.shared_gpu else "this process and the server do not see the same GPUs"


def _no_nccl(facts: ServerFacts) -> str:
    if not facts.gpus:
        return "the server runs on the CPU"
    return "" if facts.spare_gpu else "every GPU that this process sees has a server"


def _risk_of_gloo(facts: ServerFacts) -> str:
    return "" if facts.here else "a server on another machine hangs if it cannot reach this one"


WAYS: Sequence[Way] = (
    Way("ipc", _ipc, _no_shared_gpu),
    Way("nccl", _nccl, _no_nccl, risk=lambda facts: "it would take a GPU that may be somebody else's"),
    Way("disk", lambda end, facts, settings: DiskTransport(end)),
    Way("gloo", _gloo, risk=_risk_of_gloo),
)


def choose(wanted: str, facts: ServerFacts) -> tuple[list[Way], str]:
    """The ways to try, best first, and in words why not the others. `wanted` is `weights.into_servers`."""
    ways, reasons = [], []
    for way in WAYS:
        if wanted not in (AUTO, way.name):
            continue
        reason = way.obstacle(facts) or (way.risk(facts) if wanted == AUTO else "")
        if reason:
            reasons.append(f"not by {way.name}: {reason}")
        else:
            ways.append(way)
    return ways, "; ".join(reasons)


def facts_of(host: str, port: int, info: Mapping[str, Any], taken: Sequence[int] = ()) -> ServerFacts:
    """What a server's `/server_info` says, compared with the process that listens at its address if that is ours."""
    first, count = int(info.get("base_gpu_id") or 0), int(info.get("tp_size") or 1)
    gpus = range(first, first + count) if str(info.get("device")).startswith("cuda") else ()
    server = _listener(port) if _is_ours(host, port) else None
    same = server is not None and all(server.get(name) == os.environ.get(name) for name in GPU_CHOICE)
    return ServerFacts(server is not None, gpus, same, torch.cuda.device_count(), taken)


def _is_ours(host: str, port: int) -> bool:
    """Whether this machine's address on the way to `host` is the host's own."""
    try:
        return socket.gethostbyname(host) == address_towards(host, port)
    except OSError:
        return False


def _listener(port: int) -> Mapping[str, str] | None:
    """The environment of the SGLang process that listens at a port of this machine.

    None where this process sees no such process, because another user or a container runs it, or a tunnel listens.
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
        # What this process may not look at is treated like a server on another machine.
        return None
    return None


def _container(pid: int | str = "self") -> str:
    return str(Path(f"/proc/{pid}/ns/mnt").readlink())
