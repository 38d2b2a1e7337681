"""The launchers, which start the processes of a run: on this machine, or as `cluster.launcher` says."""

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
        """The hosts that the run may use. Raises ConfigError: there are none."""

    def is_one_machine(self) -> bool:
        """True if all hosts are this machine."""

    def check_addresses(self, placement: Placement) -> None:
        """Raises ConfigError: `prepare` would find no address at which others reach the replay or the learner."""

    def prepare(self, placement: Placement, stop: threading.Event) -> None:
        """Set the addresses and ports in the configuration that it leaves open, so that all roles share them. Raises
        UnavailableError: no port is free; ConfigError: the hosts cannot have the placement; StoppedError."""

    def set_placement(self, placement: Placement) -> None:
        """Start roles by this placement from now on; it may have more or fewer actors and scorers.

        Raises ConfigError: roles that run would have other GPUs.
        """

    def end_left(self, stop: threading.Event) -> Collection[str]:
        """End what an earlier start of the run has left on the hosts that `prepare` got, and tell which kernels
        (`ProcessIdentity.kernel`) these have. `stop` cuts it short. The caller has done so on this machine."""

    def watch(self, supervisor: Supervisor) -> None:
        """Called at every poll, to change what the supervisor does."""

    def close(self) -> None:
        """All roles have ended."""


class LocalLauncher:
    """This machine."""

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
