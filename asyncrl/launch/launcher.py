"""The interface of launchers, which start the processes of a run, and the launcher for this machine."""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import partial
from typing import Protocol

from asyncrl.config.locations import record_config
from asyncrl.config.schema import ClusterConfig, TrainConfig
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.placement.placement import Placement, check_unmoved
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.processes import this_host
from asyncrl.launch.role_process import LocalProcess, Start
from asyncrl.launch.supervisor import Supervisor


class Launcher(Protocol):
    """Starts the roles of one run, from `prepare` until `close`."""

    @property
    def start(self) -> Start: ...

    def hosts(self) -> list[Host]:
        """Return the hosts that the run may use. Raises ConfigError: there are none."""

    def is_one_machine(self) -> bool:
        """True if all hosts are this machine."""

    def check_addresses(self, placement: Placement) -> None:
        """Raise ConfigError if `prepare` would find no address at which other hosts reach the replay or the learner."""

    def prepare(self, placement: Placement, stop: threading.Event) -> None:
        """Choose the addresses and ports that the configuration leaves open, so that all roles share them. Raises
        UnavailableError: no port is free; ConfigError: the hosts cannot run the placement; StoppedError: `stop` was
        set."""

    def set_placement(self, placement: Placement) -> None:
        """Start roles by this placement from now on. It may have more or fewer actors and scorers than before.

        Raises ConfigError: running roles would get other GPUs.
        """

    def end_left(self, stop: threading.Event) -> Collection[str]:
        """End the processes that an earlier launcher of the run left on the hosts of the placement. Return the kernel
        ids (`ProcessIdentity.kernel`) of the hosts that answered. `stop` interrupts this. The processes on this machine
        are left to the caller."""

    def watch(self, supervisor: Supervisor) -> None:
        """Called at every poll of the `supervisor`. The launcher can use the supervisor to restart roles."""

    def close(self) -> None:
        """Free the launcher's resources, after all roles have ended."""


class LocalLauncher:
    """Starts all roles on this machine."""

    start: Start = LocalProcess

    def __init__(self, cluster: ClusterConfig, addresses: RunAddresses) -> None:
        self._cluster, self._addresses = cluster, addresses
        self._placement: Placement | None = None

    def hosts(self) -> list[Host]:
        return [this_host(self._cluster)]

    def is_one_machine(self) -> bool:
        return True

    def check_addresses(self, placement: Placement) -> None:
        pass

    def prepare(self, placement: Placement, stop: threading.Event) -> None:
        self._addresses.choose_ports()
        self._placement = placement

    def set_placement(self, placement: Placement) -> None:
        if self._placement is not None:
            check_unmoved(self._placement, placement)
        self._placement = placement

    def end_left(self, stop: threading.Event) -> Collection[str]:
        return ()

    def watch(self, supervisor: Supervisor) -> None:
        pass

    def close(self) -> None:
        pass


def open_launcher(config: TrainConfig) -> Launcher:
    """Open the launcher that `cluster.launcher` names. Raises ConfigError: it cannot be used here."""
    cluster, addresses = config.cluster, RunAddresses.of(config)
    if cluster.launcher == "hosts":
        from asyncrl.launch.hosts.launcher import HostsLauncher

        return HostsLauncher(cluster, addresses)
    if cluster.launcher == "ray":
        from asyncrl.launch.ray.launcher import RayLauncher

        return RayLauncher(cluster, addresses, partial(record_config, config))
    if cluster.launcher == "slurm":
        from asyncrl.launch.slurm.commands import this_job
        from asyncrl.launch.slurm.launcher import SlurmLauncher

        return SlurmLauncher(cluster, addresses, this_job())
    return LocalLauncher(cluster, addresses)
