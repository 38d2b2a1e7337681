"""Nodes of a Ray cluster as processes of this machine, which die like machines: all at once, and with a SIGKILL."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, Self

import psutil
from ray.cluster_utils import Cluster

from asyncrl.machine.ports import free_ports
from tests.end_to_end.support import Run
from tests.helpers import living, until

COUNT = 4
CPUS = 2
DISK = "disk"
"""The custom resource of the one node that may have the replay."""
POOLS = (
    "cluster.pools={memory: {nodes: 1, cpus: 1}, train: {nodes: 1, cpus: 1}, rollout: {nodes: 1, cpus: 1}}",
    "cluster.roles={replay: memory, learner: train, actor: rollout, scoring: rollout}",
)
"""One node more than the run needs."""
FAST_DEATH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
"""Ray notices a dead node within a few seconds, and not within half a minute."""


class Nodes:
    """Four nodes and a head that runs no role, until a `with` block ends. A node's name is its address."""

    def __init__(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        port = free_ports(1)
        self.dashboard = f"http://127.0.0.1:{port}"
        """The address at which the cluster takes jobs."""
        head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port, "_system_config": FAST_DEATH}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}
        self.names = [f"127.0.0.{2 + number}" for number in range(COUNT)]
        for name in self.names:
            self.add(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._nodes):
            self.kill(name)
        self._cluster.shutdown()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def disk(self) -> str:
        """The node with the disk."""
        return self.names[-1]

    def add(self, name: str) -> None:
        """Start a node, or one that has died, again."""
        resources = {DISK: 1} if name == self.names[-1] else {}
        self._nodes[name] = self._cluster.add_node(
            num_cpus=CPUS, node_ip_address=name, resources=resources, object_store_memory=80_000_000, wait=False
        )

    def processes(self, name: str) -> list[psutil.Process]:
        """Everything that runs on a node."""
        found: list[psutil.Process] = []
        for each in self._nodes[name].live_processes():
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(each[1].pid)
                found += [root, *root.children(recursive=True)]
        return found

    def kill(self, name: str) -> None:
        """The end of a node without a farewell."""
        processes = self.processes(name)
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        node = self._nodes.pop(name)
        self._cluster.remove_node(node, allow_graceful=False)
        until(lambda: not living(processes))


def on_ray(nodes: Nodes) -> list[str]:
    return [
        "cluster.launcher=ray",
        f"cluster.ray.address={nodes.address}",
        f"cluster.ray.replay_resource={DISK}",
        *POOLS,
    ]


def hosts(run: Run) -> dict[str, str]:
    """Return the host of each role."""
    file = run.dir / "processes.json"
    told = json.loads(file.read_text()) if file.exists() else {}
    return {name: role["host"] for name, role in told.items() if role["pid"]}
