"""Decides how many servers share each GPU, if the configuration leaves that open."""

from __future__ import annotations

from collections import Counter

from asyncrl.config.schema import EngineConfig, ModelConfig, WeightsConfig
from asyncrl.engine.sglang.fitting import servers_together
from asyncrl.launch.placement.placement import Placement
from asyncrl.machine.gpu_use import gpu_bytes

OTHER_WORK = 2
"""The servers of a host may use the CPUs of the host, divided by `OTHER_WORK`. The rest is for the other processes."""


def settle_servers(
    engine: EngineConfig, weights: WeightsConfig, model: ModelConfig, episodes: int, placement: Placement
) -> bool:
    """Set the number of servers on each GPU, if that is open and several are faster. True if it was set; the roles must
    then be placed again.

    `placement` has one server on each GPU of this machine. Each actor runs `episodes` at once. If the weights of the
    model are not in files on this machine, its size is unknown, and the number stays open.
    """
    if not _is_open(engine, weights, placement):
        return False
    import pynvml

    from asyncrl.modelling.shapes import weight_files

    size = sum(file.stat().st_size for file in weight_files(model))
    if not size or (memory := gpu_bytes(pynvml)) is None:
        return False
    used = Counter(role.node for role in placement.of("actor") for _ in role.gpus or ())
    best = min(
        servers_together(
            size, episodes // len(role.gpus), placement.hosts[role.node].cpus // OTHER_WORK // used[role.node], memory
        )
        for role in placement.of("actor")
        if role.gpus
    )
    if best > 1:
        engine.server.per_gpu = best
    return best > 1


def _is_open(engine: EngineConfig, weights: WeightsConfig, placement: Placement) -> bool:
    """True if the number of servers on a GPU is not configured, and several are possible."""
    server = engine.server
    if not engine.launches or server.per_gpu is not None or server.count is not None or server.tp_size > 1:
        return False
    if server.device not in (None, "cuda") or placement.in_turns or weights.into_servers == "nccl":
        return False
    own = {(role.node, gpu) for role in placement.of("actor") for gpu in role.gpus or ()}
    others = {(role.node, gpu) for role in placement.roles if role.module != "actor" for gpu in role.gpus or ()}
    return bool(own) and own.isdisjoint(others)
