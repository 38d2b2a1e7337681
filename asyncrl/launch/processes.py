"""Makes the command line and the environment of a placed role's process, and counts this host's GPUs and CPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from asyncrl.config.schema import ClusterConfig
from asyncrl.launch.placement.placement import PlacedRole
from asyncrl.launch.placement.pools import Host
from asyncrl.machine.numa import GPU_VARIABLE, visible_gpus

ROLE_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
"""Environment variables of every role."""


def this_host(cluster: ClusterConfig, gpus: int | None = None) -> Host:
    """Return the GPUs and CPUs of this host that the run may use. `gpus` is the host's number of GPUs. `None`: they are
    counted, unless `cluster.gpus` sets their number."""
    if gpus is None and cluster.gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    used = cluster.gpus if cluster.gpus is not None else gpus
    assert used is not None
    return Host(used, cluster.cpus or len(os.sched_getaffinity(0)))


def role_command(module: str, path: Path, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command line of a role that reads the configuration at `path`."""
    quoted = str(path.absolute()).replace("'", "\\'")
    return [python, "-m", f"asyncrl.{module}", f"experiment='{quoted}'", *arguments]


def role_environment(role: PlacedRole, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables to add to the environment of a placed role. If `inherited` limits the visible GPUs,
    `role.gpus` are indices into the visible ones."""
    environment = {**ROLE_ENVIRONMENT, "OMP_NUM_THREADS": str(role.threads)}
    if role.gpus is not None:
        visible = visible_gpus(inherited.get(GPU_VARIABLE, ""))
        environment[GPU_VARIABLE] = ",".join(visible[gpu] if visible else str(gpu) for gpu in role.gpus)
    return environment
