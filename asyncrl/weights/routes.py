"""The routes by which weights travel. Each of the two hops has a table of routes, best first. `choose` chooses from a
table.

    learner ──TO_ENGINES──► engine of an actor ──INTO_SERVERS──► servers of its fleet

`weights.to_engines` is the setting of the first hop, `weights.into_servers` that of the second. Each is the name of a
route, or `auto`. With `auto`, a process takes the first route that works and on which neither side can hang. If a route
fails, the next one brings the version.

| to engines | how | memory that an engine needs in addition to its weights | file of the engine's end |
|---|---|---|---|
| disk | the learner writes folders, engines or their servers read them | none if servers read | disk_route.py |
| distributed | the learner broadcasts to a group: NCCL on GPUs, else gloo | the next version | distributed_route.py |
| zmq | engines pull versions or deltas from the learner | the last and the next version | zmq_route.py |

| into servers | how | file of the actor's end |
|---|---|---|
| ipc | an SGLang server opens handles of buffers on its own GPU | engine/sglang/routes/ipc.py |
| nccl | a group of the actor and the server's GPUs | engine/sglang/routes/distributed.py |
| disk | SGLang and vLLM servers load a folder | engine/sglang/routes/base.py, engine/vllm/server.py |
| gloo | as nccl, but from CPU memory to CPU memory | engine/sglang/routes/distributed.py |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

AUTO = "auto"

Facts = TypeVar("Facts")


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """The configuration of routes. It is the same in all processes of a run.

    - `to_engines`, `into_servers` and `engine`: the options weights.to_engines, weights.into_servers and engine.kind.
    - `on_loopback`: only processes on the learner's own machine can reach the learner.
    - `folder`: the place of the disk route's folders.
    """

    to_engines: str = AUTO
    into_servers: str = AUTO
    engine: str = "embedded"
    on_loopback: bool = True
    folder: Path = Path("pushed")

    @property
    def nccl_into_servers(self) -> bool:
        """True if actors bring weights to their servers by NCCL."""
        return self.engine != "embedded" and self.into_servers == "nccl"

    @property
    def broadcasts_to_other_machines(self) -> bool:
        """True if the learner may broadcast beyond its own machine."""
        return self.to_engines == "distributed" and not self.on_loopback


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The facts that decide which routes to engines work. `on_gpu`: this process has its weights on a GPU."""

    settings: RouteSettings
    on_gpu: bool


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The facts about a server and this machine that decide which routes into the server work.

    - `here`: this process and the server's process are in the same container, and can see each other.
    - `gpus`: the indices of the server's GPUs; empty if it runs on the CPU.
    - `same_gpus`: an index means the same GPU in the server and in this process.
    - `visible`: the number of GPUs that this process sees.
    - `taken`: the indices of this machine's GPUs that a server uses.
    """

    here: bool = False
    gpus: Sequence[int] = ()
    same_gpus: bool = False
    visible: int = 0
    taken: Sequence[int] = ()

    @property
    def shared_gpu(self) -> torch.device | None:
        """The server's first GPU, if this process can use it too."""
        usable = self.here and self.gpus and self.same_gpus and self.gpus[0] < self.visible
        return torch.device("cuda", self.gpus[0]) if usable else None

    @property
    def spare_gpu(self) -> torch.device | None:
        """The last GPU of this machine that no server uses; None if servers use all GPUs. It is the last one, because
        the learner has the first GPUs."""
        free = set(range(self.visible)) - {*self.taken, *(self.gpus if self.here else ())}
        return torch.device("cuda", max(free)) if free else None


def _none(facts: object) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Route(Generic[Facts]):
    """A route: one row of a table.

    - `name`: the name of the route.
    - `why`: the reason to take it.
    - `missing` returns a requirement of the route that is not met, or "" if all are met.
    - `risk` returns the reason why `auto` avoids the route although it works, or "" if `auto` may take it.
    - `always`: the route is served even if another route is configured, and is tried last.
    """

    name: str
    why: str
    missing: Callable[[Facts], str] = _none
    risk: Callable[[Facts], str] = _none
    always: bool = False


@dataclass(frozen=True, slots=True)
class RouteChoice(Generic[Facts]):
    """The `routes` to try, best first. `why` is the reason for the first route, and `left_out` has the reasons against
    other routes."""

    routes: Sequence[Route[Facts]]
    why: str
    left_out: str


def choose(table: Sequence[Route[Facts]], wanted: str, facts: Facts) -> RouteChoice[Facts]:
    """Choose among the routes of a hop: the `wanted` route, or with `auto` all routes that work and cannot hang."""
    routes, reasons = [], []
    for route in table:
        if wanted not in (AUTO, route.name) and not route.always:
            continue
        reason = route.missing(facts) or (route.risk(facts) if wanted == AUTO else "")
        if reason:
            reasons.append(f"not by {route.name}: {reason}")
        else:
            routes.append(route)
    why = "the configuration names it" if wanted != AUTO else next((route.why for route in routes), "")
    return RouteChoice(routes, why, "; ".join(reasons))


def routes_to_engines(settings: RouteSettings, device: torch.device) -> RouteChoice[EngineFacts]:
    """Choose the routes from the learner to its engines. The learner and each engine call this and choose the same
    routes.

    `device` holds the weights in this process, which is the learner's or an engine's.
    """
    return choose(TO_ENGINES, settings.to_engines, EngineFacts(settings, device.type == "cuda"))


def _risk_of_disk(facts: EngineFacts) -> str:
    if not facts.settings.on_loopback:
        return "other machines may not share the folder"
    loads_folders = facts.settings.engine == "vllm" or (
        facts.settings.engine == "sglang" and facts.settings.into_servers == "disk"
    )
    return "" if loads_folders else "no server loads a folder"


def _risk_of_broadcasts(facts: EngineFacts) -> str:
    if not facts.settings.on_loopback:
        return "a side hangs if it cannot reach the other one"
    if facts.settings.engine != "embedded":
        return "the engines are servers"
    return "" if facts.on_gpu else "the engine computes on the CPU"


def _no_shared_gpu(facts: ServerFacts) -> str:
    if not facts.gpus:
        return "the server runs on the CPU"
    if not facts.here:
        return "this process cannot see the server's process on this machine"
    return "" if facts.shared_gpu else "this process and the server do not see the same GPUs"


def _no_spare_gpu(facts: ServerFacts) -> str:
    if not facts.gpus:
        return "the server runs on the CPU"
    return "" if facts.spare_gpu else "every GPU that this process sees has a server"


def _risk_of_nccl(facts: ServerFacts) -> str:
    return "it would take a GPU that may be somebody else's"


def _risk_of_gloo(facts: ServerFacts) -> str:
    return "" if facts.here else "a server on another machine hangs if it cannot reach this one"


TO_ENGINES: Sequence[Route[EngineFacts]] = (
    Route("disk", "the servers of this machine load folders", risk=_risk_of_disk),
    Route("distributed", "NCCL copies from GPU to GPU of this machine", risk=_risk_of_broadcasts),
    # The learner always serves this route, so engines that missed a broadcast or a folder get the version too.
    Route("zmq", "it is the fastest into host memory, and with deltas it sends the fewest bytes", always=True),
)
"""The routes from the learner to engines, `weights.to_engines`."""

INTO_SERVERS: Sequence[Route[ServerFacts]] = (
    Route("ipc", "the server copies within its own GPU", _no_shared_gpu),
    Route("nccl", "a spare GPU sends to the server's", _no_spare_gpu, _risk_of_nccl),
    Route("disk", "every server can load a folder"),
    Route("gloo", "it needs neither a GPU nor a disk that both sides see", risk=_risk_of_gloo),
)
"""The routes from an actor into a server, `weights.into_servers`."""
