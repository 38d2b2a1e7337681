"""How a placed role becomes a process: its command line, its environment, its ports and keys, and what a host has."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from asyncrl.config import locations
from asyncrl.config.bind import is_loopback
from asyncrl.config.schema import ClusterConfig, TrainConfig
from asyncrl.launch.placement.placement import PlacedRole
from asyncrl.launch.placement.pools import Host
from asyncrl.machine.numa import GPU_VARIABLE, visible_gpus
from asyncrl.machine.ports import free_ports
from asyncrl.network.keys import check_keys, make_keys

log = logging.getLogger("asyncrl.train")

KEYS_FOLDER = "keys"
ROLE_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
"""Environment variables of every role."""


def this_host(cluster: ClusterConfig, gpus: int | None = None) -> Host:
    """What the run may use of this host, which has so many `gpus`; None: they are counted, if the configuration does
    not say how many it uses."""
    if gpus is None and cluster.gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    used = cluster.gpus if cluster.gpus is not None else gpus
    assert used is not None
    return Host(used, cluster.cpus or len(os.sched_getaffinity(0)))


def choose_ports(config: TrainConfig) -> None:
    """Sets the ports that the configuration leaves open, so that all roles share them.

    Raises UnavailableError: none is free.
    """
    for key, count in (("replay_port", config.replay.shards), ("weights_port", 1)):
        if not getattr(config.network, key):
            setattr(config.network, key, free_ports(count))


def close_to_others(config: TrainConfig) -> None:
    """Make keys for a run that other machines can reach and that has none."""
    network = config.network
    alone = is_loopback(network.replay_address) and is_loopback(network.learner_address)
    # What has keys uses them also where the learner's hosts cannot: gloo and NCCL between these need `insecure`.
    if alone or network.keys is not None or (network.insecure and config.learner.nodes == 1):
        return
    take_keys(config)


def take_keys(config: TrainConfig) -> None:
    """Use the keys in the run's folder, which are made where there are none, unless the configuration names others.

    Raises ConfigError: they cannot be used.
    """
    if config.network.keys is None:
        folder = locations.run_dir(config.run).absolute() / KEYS_FOLDER
        if not folder.exists():
            make_keys(folder)
            log.info("made keys for this run in %s", folder)
        config.network.keys = str(folder)
    check_keys(config.network.keys)


def role_command(module: str, path: Path, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command line of a role that reads the configuration at `path`."""
    quoted = str(path.absolute()).replace("'", "\\'")
    return [python, "-m", f"asyncrl.{module}", f"experiment='{quoted}'", *arguments]


def role_environment(role: PlacedRole, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a placed role's process has in its environment beside what it inherits. If the host's GPUs are limited by
    `inherited`, the numbers of the role's GPUs count those."""
    environment = {**ROLE_ENVIRONMENT, "OMP_NUM_THREADS": str(role.threads)}
    if role.gpus is not None:
        visible = visible_gpus(inherited.get(GPU_VARIABLE, ""))
        environment[GPU_VARIABLE] = ",".join(visible[gpu] if visible else str(gpu) for gpu in role.gpus)
    return environment
