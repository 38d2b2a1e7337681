"""Connects a run to a Ray cluster, and reserves parts of the cluster's hosts for the run."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.schema import ClusterConfig
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.launch.placement.placement import PlacedRole, Placement
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.ray.role import OnNode

log = logging.getLogger(__name__)

ADDRESS_VARIABLE = "RAY_ADDRESS"
"""The variable in which Ray itself looks for a cluster; a job of `ray job submit` has it."""
LOOK_S, NOTICE_S, CONNECT_S = 0.5, 10.0, 10.0
A_LITTLE = 0.001
"""The amount of a custom resource whose only purpose is to choose the host."""


def ray_module() -> Any:
    """Import Ray. Raises ConfigError: it is not installed, or it cannot be imported."""
    try:
        import ray
        import ray.exceptions
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(f"cluster.launcher=ray needs the extra: pip install 'asyncrl[ray]' ({error})") from error
    return ray


def _check_address(address: str) -> None:
    """Raises ConfigError at once: the address cannot work, and Ray itself might try it for minutes."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"cluster.ray.address={address}: start the run on a node of the cluster, with the address HOST:PORT of its "
            "head, or submit it with `ray job submit`"
        )
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except OSError as error:
            raise ConfigError(
                f"cluster.ray.address={address}: no Ray cluster is there ({error}); `ray start --head` begins one"
            ) from error


class RayCluster:
    """A connection to the cluster that `cluster.ray` names, or to a new one on this machine, until `close`.

    Raises ConfigError: Ray is not installed, or the cluster does not exist.
    """

    def __init__(self, cluster: ClusterConfig) -> None:
        self.ray = ray_module()
        self._cluster = cluster
        address = cluster.ray.address or os.environ.get(ADDRESS_VARIABLE)
        if address:
            log.info("joining the Ray cluster at %s", address)
            _check_address(address)
        else:
            log.info("starting a Ray cluster on this machine; set cluster.ray.address to use an existing cluster")
        # Ray takes no sizes for an existing cluster.
        new = {} if address else {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus, "include_dashboard": False}
        try:
            self.ray.init(
                address=address or "local",
                runtime_env=dict(cluster.ray.runtime_env) or None,
                log_to_driver=False,
                logging_level=logging.WARNING,
                **new,
            )
        except Exception as error:  # Ray raises a plain Exception if its own node starts too slowly.
            raise ConfigError(f"cluster.ray.address={address}: {error}") from error

    def close(self) -> None:
        """Leave the cluster. This ends every Ray actor of this run, and the cluster itself if the run started it."""
        self.ray.shutdown()

    def own_address(self) -> str:
        """Return the address of the node that this process is on."""
        return str(self.ray.util.get_node_ip_address())

    def addresses(self) -> list[str]:
        """Return the addresses of the nodes that can run a role now."""
        nodes = (node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1)
        return [str(node["NodeManagerAddress"]) for node in nodes]

    def hosts(self) -> list[Host]:
        """Return the nodes that can run a role now, sorted by their number of GPUs, the largest first. Raises
        ConfigError: no node has a CPU."""
        found = []
        for node in self.ray.nodes():
            has = node["Resources"]
            if node["Alive"] and has.get("CPU", 0) >= 1:
                found.append((int(has.get("GPU", 0)), int(has["CPU"])))
        if not found:
            raise ConfigError("cluster.launcher=ray: no node of the Ray cluster has a CPU; start one with --num-cpus")
        most = self._cluster
        return [
            Host(gpus if most.gpus is None else min(gpus, most.gpus), min(cpus, most.cpus or cpus))
            for gpus, cpus in sorted(found, reverse=True)
        ]

    def free_cpus(self) -> float:
        """Return the CPUs of the cluster that are not reserved."""
        return float(self.ray.available_resources().get("CPU", 0))

    def actor(self, kind: type[Any], folder: Path, **options: Any) -> Any:
        """Make a Ray actor of the class `kind`. Its process starts once the cluster has room."""
        return self.ray.remote(kind).options(**options).remote(str(folder))

    def wait(self, reference: Any, what: str, stop: threading.Event) -> Any:
        """Wait for the result of a remote call, and log that the run waits for `what`. Raises StoppedError: `stop` was
        set; ConfigError: the call failed."""
        shown = time.monotonic()
        while not self.ray.wait([reference], timeout=LOOK_S)[0]:
            if stop.is_set():
                raise StoppedError("stopped while it waited for room in the Ray cluster")
            if time.monotonic() - shown > NOTICE_S:
                shown = time.monotonic()
                free = self.ray.available_resources()
                left = ", ".join(f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
                log.info("waiting for %s; the cluster has %s left", what, left)
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise ConfigError(f"Ray cannot give {what}: {error}") from error


@dataclass(frozen=True, slots=True)
class HostPart:
    """A reserved part of one host.

    - `strategy`: the strategy that makes Ray start roles there;
    - `holder`: the Ray actor that reserves the part;
    - `address`: the address of its current host;
    - `gpus`: the numbers of its GPUs in the placement.
    """

    strategy: Any
    holder: Any
    address: str
    gpus: tuple[int, ...] = ()


class HeldParts:
    """The parts of a cluster that a run reserves: a placement group for each pool, and one for the replay.

    If a host dies, Ray moves its part to another host as soon as one has room. Only the replay's part waits for the
    host of its store. If `resource` is given, this is the host with that custom resource. Otherwise it is the host on
    which the replay ran first, whose address is in the file `remembered`. Raises StoppedError; ConfigError: the cluster
    cannot provide the parts.
    """

    def __init__(
        self,
        cluster: RayCluster,
        placement: Placement,
        folder: Path,
        resource: str | None,
        remembered: Path,
        stop: threading.Event,
    ) -> None:
        self._cluster, self._folder, self._stop = cluster, folder, stop
        self.replay: HostPart | None = None
        self.pools: dict[tuple[str, int], HostPart] = {}
        replays = placement.of("replay")
        pin = resource or (f"node:{remembered.read_text().strip()}" if remembered.exists() else None)
        if replays and pin is not None:
            if pin not in cluster.ray.cluster_resources():
                log.warning(
                    "the replay waits for a host with %s, where its store is; if the store is on a disk that all hosts "
                    "share, delete %s",
                    *(pin, remembered),
                )
            self.replay = self._hold_replay(placement, pin)
        self._hold_pools(placement)
        if replays and self.replay is None:
            self.replay = self._hold_replay(placement, None)
            remembered.write_text(self.replay.address)

    def of(self, role: PlacedRole) -> HostPart | None:
        """Return the part that a role of the placement runs in."""
        return self.replay if role.module == "replay" else self.pools.get((role.pool, role.node))

    @property
    def all(self) -> list[HostPart]:
        return [*self.pools.values(), *([self.replay] if self.replay is not None else [])]

    def _hold_pools(self, placement: Placement) -> None:
        pools: dict[str, dict[int, list[PlacedRole]]] = {}
        for role in placement.roles:
            if role.module != "replay":
                pools.setdefault(role.pool, {}).setdefault(role.node, []).append(role)
        for pool, nodes in pools.items():
            bundles = [_bundle(placement, roles) for roles in nodes.values()]
            _, held = self._hold(f"the pool {pool}", bundles, [_gpus(roles) for roles in nodes.values()])
            self.pools |= {(pool, node): each for node, each in zip(nodes, held, strict=True)}

    def _hold_replay(self, placement: Placement, pin: str | None) -> HostPart:
        """Reserve the replay's part on the host with the resource `pin`. `None`: on any host, where it then stays."""
        bundle = _bundle(placement, placement.of("replay"))
        addresses = self._cluster.addresses()
        if pin is None and len(addresses) == 1:
            pin = f"node:{addresses[0]}"
        if pin is None:
            group, [found] = self._hold("the replay", [bundle], [()])
            self._cluster.ray.util.remove_placement_group(group)
            pin = f"node:{found.address}"
        _, [held] = self._hold("the replay", [{**bundle, pin: A_LITTLE}], [()])
        return held

    def _hold(
        self, what: str, bundles: list[dict[str, float]], gpus: list[tuple[int, ...]]
    ) -> tuple[Any, list[HostPart]]:
        cluster = self._cluster
        group = cluster.ray.util.placement_group(bundles, "STRICT_SPREAD" if len(bundles) > 1 else "PACK")
        cluster.wait(group.ready(), f"{what}, which needs {bundles}", self._stop)
        held = []
        for index, (bundle, numbers) in enumerate(zip(bundles, gpus, strict=True)):
            strategy = cluster.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            )
            holder = cluster.actor(
                OnNode,
                self._folder,
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=strategy,
                max_restarts=-1,
                max_task_retries=-1,
            )
            address = cluster.wait(holder.address.remote(), f"an actor for {what}", self._stop)
            held.append(HostPart(strategy, holder, address, numbers))
        return group, held


def _bundle(placement: Placement, roles: Sequence[PlacedRole]) -> dict[str, float]:
    """Return the resources for `roles`, which are on one host: their GPUs, and the CPUs that they keep busy. If all
    roles on the host would keep more CPUs busy than it has, each gets a proportional share of them."""
    node = roles[0].node
    wanted, own = (
        sum(role.cpus for role in each) for each in ([role for role in placement.roles if role.node == node], roles)
    )
    cpus = int(100 * own * min(1.0, placement.hosts[node].cpus / wanted)) / 100
    gpus = _gpus(roles)
    return {"CPU": cpus, **({"GPU": len(gpus)} if gpus else {})}


def _gpus(roles: Sequence[PlacedRole]) -> tuple[int, ...]:
    return tuple(sorted(set[int]().union(*(role.gpus or () for role in roles))))
