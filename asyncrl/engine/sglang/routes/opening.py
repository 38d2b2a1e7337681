"""The actor's end of each route into an SGLang server (weights/routes.py has the table and the choice)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncrl.engine.fleet.update import CPU
from asyncrl.engine.sglang.routes.base import DiskServerRoute, ServerEnd, ServerRoute
from asyncrl.engine.sglang.routes.distributed import DistributedServerRoute
from asyncrl.engine.sglang.routes.ipc import IpcServerRoute
from asyncrl.weights.routes import AUTO, INTO_SERVERS, ServerFacts, choose

GPU_BUCKET_BYTES = 512 << 20
"""The size of buckets. A request for a bucket costs a server some milliseconds, in which a GPU copies about this
much."""

GPU_RESERVE_BYTES = 4 << 30
"""The memory of a server's GPU that stays free for the server's activations if `weights.into_servers` is `auto`."""


@dataclass(frozen=True, slots=True)
class ServerRouteSettings:
    """The configuration of routes into servers.

    - `wanted`: the value of `weights.into_servers`
    - `bucket_bytes`: the size of buckets on the CPU
    - `timeout_s`: the seconds that a server may be silent in a group
    - `insecure`: the value of `network.insecure`
    """

    wanted: str = AUTO
    bucket_bytes: int = 64 << 20
    timeout_s: float = 30.0
    insecure: bool = False


def open_server_routes(
    end: ServerEnd, facts: ServerFacts, settings: ServerRouteSettings
) -> tuple[dict[str, ServerRoute], str]:
    """Return the routes to try, by name, the best route first. Also return the reasons against the other routes."""
    chosen = choose(INTO_SERVERS, settings.wanted, facts)
    return {route.name: OPENERS[route.name](end, facts, settings) for route in chosen.routes}, chosen.left_out


def _ipc(end: ServerEnd, facts: ServerFacts, settings: ServerRouteSettings) -> ServerRoute:
    assert facts.shared_gpu is not None
    reserve = GPU_RESERVE_BYTES if settings.wanted == AUTO else 0
    return IpcServerRoute(end, facts.shared_gpu, GPU_BUCKET_BYTES, reserve)


def _nccl(end: ServerEnd, facts: ServerFacts, settings: ServerRouteSettings) -> ServerRoute:
    assert facts.spare_gpu is not None
    return DistributedServerRoute(end, facts.spare_gpu, GPU_BUCKET_BYTES, settings.timeout_s, settings.insecure)


def _disk(end: ServerEnd, facts: ServerFacts, settings: ServerRouteSettings) -> ServerRoute:
    return DiskServerRoute(end)


def _gloo(end: ServerEnd, facts: ServerFacts, settings: ServerRouteSettings) -> ServerRoute:
    return DistributedServerRoute(end, CPU, settings.bucket_bytes, settings.timeout_s, settings.insecure)


OPENERS: Mapping[str, Callable[[ServerEnd, ServerFacts, ServerRouteSettings], ServerRoute]] = {
    "ipc": _ipc,
    "nccl": _nccl,
    "disk": _disk,
    "gloo": _gloo,
}
