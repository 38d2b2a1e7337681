"""`cluster.launcher=ray`: starts the roles of a run in Ray actors, which are processes of a Ray cluster.

For each pool, the run reserves resources of the cluster (a placement group). Each role is the child of its own Ray
actor, with the same command line as under any other launcher. The supervisor restarts an ended role on its node, or on
another node with room if its node has died.

The replay stays on the node that has its store. If replay or learner restart at another address, all other roles are
restarted with the new address.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.exits import EXIT_FAILURE, EXIT_STOPPED
from asyncrl.config.schema import ClusterConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.placement.placement import PlacedRole, Placement
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.ray.cluster import HeldParts, RayCluster
from asyncrl.launch.ray.role import HostedRole
from asyncrl.launch.role_process import RoleCommand, RoleProcess
from asyncrl.launch.supervisor import Supervisor
from asyncrl.machine.activity import FINISH_S
from asyncrl.machine.identity import ProcessIdentity
from asyncrl.machine.shared_folder import canary

log = logging.getLogger(__name__)

REPLAY_NODE_FILE = "replay-node"
"""The file in the run's folder with the address of the node that has the replay's store."""
POLL_S = 0.25
WAITS_S = 20.0
CALL_S = 10.0
"""The longest wait for the answer of a Ray actor whose process runs."""
LONGEST_REASON = 300


class RayLauncher:
    """The `launcher.Launcher` that starts the roles of a run on a Ray cluster.

    `prepare` reserves the resources of the placement in the cluster, until `close`. `prepare` also makes keys for a run
    that other machines can reach, if the run has no keys. It raises ConfigError if a node does not share the run's
    folder. `record` writes the configuration into the run's folder again, after a role got another address.
    """

    def __init__(self, cluster: ClusterConfig, addresses: RunAddresses, record: Callable[[], None]) -> None:
        self._cluster, self._addresses, self._record = RayCluster(cluster), addresses, record
        self._replay_resource = cluster.ray.replay_resource
        self._started_in, self._run_dir = Path.cwd(), addresses.run_dir
        self._ports = {"replay": addresses.network.replay_port, "learner": addresses.network.weights_port}
        self._hosts: dict[str, str] = {}
        self._moved: set[str] = set()
        self._roles: dict[str, PlacedRole] = {}
        self._planned: set[str] = set()
        self._held: HeldParts | None = None

    def hosts(self) -> list[Host]:
        return self._cluster.hosts()

    def close(self) -> None:
        self._cluster.close()

    def is_one_machine(self) -> bool:
        return set(self._cluster.addresses()) == {self._cluster.own_address()}

    def check_addresses(self, placement: Placement) -> None:
        pass  # The nodes of a Ray cluster have addresses.

    def prepare(self, placement: Placement, stop: threading.Event) -> None:
        self._roles = {role.name: role for role in placement.roles}
        self._planned = set(self._roles)
        remembered = self._run_dir / REPLAY_NODE_FILE
        self._held = HeldParts(self._cluster, placement, self._started_in, self._replay_resource, remembered, stop)
        self._check_folder(self._held, stop)
        for role in placement.roles:
            if self._listens(role) and (part := self._held.of(role)):
                self._settle(role.module, part.holder, part.address)
        self._addresses.close_to_others()

    def _check_folder(self, held: HeldParts, stop: threading.Event) -> None:
        """Raises ConfigError, with the nodes that do not see a file that was just written into the run's folder."""
        with canary(self._run_dir) as file:
            looks = [(part.address, part.holder.sees.remote(str(file))) for part in held.all]
            without = {
                address for address, look in looks if not self._cluster.wait(look, "a look at the run's folder", stop)
            }
        if without:
            raise ConfigError(
                f"run.dir={self._addresses.run.dir}: {self._run_dir} is not the same folder on the nodes "
                f"{', '.join(sorted(without))}; name a folder that all nodes share, by its absolute path"
            )

    @staticmethod
    def _listens(role: PlacedRole) -> bool:
        """True if other roles must know the address of this role."""
        return role.module == "replay" or role.name == "learner"

    def _settle(self, module: str, actor: Any, address: str) -> bool:
        """Set the address of the replay or the learner to `address`, the address of its node. If the configuration
        names no ports, choose ports that are free on this node, which `actor` finds. Return True if the role had
        another address before. A run on this machine alone keeps the configured address."""
        network, learner = self._addresses.network, self._addresses.learner
        parts = self._held.all if self._held is not None else []
        alone = {address, *(part.address for part in parts)} == {self._cluster.own_address()}
        host, before = network.host if alone else address, self._hosts.get(module)
        if host == before:
            return False
        self._hosts[module] = host
        if module == "replay":
            network.replay_host = host
            network.replay_port = self._ports[module] or self._free_ports(actor, self._addresses.shards)
        else:
            network.learner_host = host
            network.weights_port = self._ports[module] or self._free_ports(actor, 1)
            if learner.nodes > 1:
                learner.rendezvous = f"{host}:{self._free_ports(actor, 1)}"
        return before is not None

    def _free_ports(self, actor: Any, count: int) -> int:
        return int(self._cluster.ray.get(actor.free_ports.remote(count), timeout=CALL_S))

    def set_placement(self, placement: Placement) -> None:
        """Add roles for which nothing was reserved. Such a role runs outside the reserved parts if the cluster has room
        there. If not, a role without GPUs runs within the part of its pool, and a role with GPUs waits for room."""
        self._roles = {**{role.name: role for role in placement.roles}, **self._roles}

    def start(self, role: RoleCommand, log_file: Path, environment: Mapping[str, str]) -> RoleProcess:
        """Start a role: see `role_process.Start`."""
        return _RayProcess(self, self._cluster, role, log_file.absolute(), environment)

    def new_actor(self, name: str) -> tuple[Any, Any]:
        """Make a Ray actor for a role. Return the actor, and a reference to the names of the role's GPUs, which are
        known once the cluster has room. In place of the reference: () if the role sees no GPUs, None if it sees all."""
        role = self._roles[name]
        part = self._held.of(role) if self._held is not None else None
        # A role that was added later takes nothing from its pool's part if there is room outside, or if it needs GPUs.
        if name not in self._planned and (role.gpus or self._cluster.free_cpus() >= role.cpus):
            part = None
        if part is not None:
            options = {"num_cpus": 0, "scheduling_strategy": part.strategy}
        else:
            options = {"num_cpus": role.cpus, "num_gpus": len(role.gpus or ()), "scheduling_strategy": "SPREAD"}
        actor = self._cluster.actor(HostedRole, self._started_in, **options)
        if not role.gpus:
            return actor, role.gpus
        if part is None:
            return actor, actor.gpus.remote(range(len(role.gpus)))
        return actor, part.holder.gpus.remote([part.gpus.index(gpu) for gpu in role.gpus])

    def arrived(self, name: str, actor: Any, address: str) -> None:
        """Called when a role is about to start on the node with this address."""
        role = self._roles[name]
        if self._listens(role) and self._settle(role.module, actor, address):
            log.warning("%s is now at %s; restarting all other roles with its new address", name, address)
            self._record()
            self._moved.add(name)

    def end_left(self, stop: threading.Event) -> Collection[str]:
        held = self._held.all if self._held is not None else []
        asked = [part.holder.end_left.remote(str(self._run_dir)) for part in held]
        return {str(self._cluster.wait(each, "the end of roles from an earlier start", stop)) for each in asked}

    def watch(self, supervisor: Supervisor) -> None:
        """Restart the roles that still use an old address, after the replay or the learner got a new one."""
        if self._moved:
            supervisor.restart(supervisor.restarts.keys() - self._moved)
            self._moved.clear()


class _RayProcess:
    """A role in its own Ray actor. The role waits for room in the cluster, then for its start, and then runs."""

    lease_s = FINISH_S

    def __init__(
        self,
        launcher: RayLauncher,
        cluster: RayCluster,
        role: RoleCommand,
        log_file: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._launcher, self._ray = launcher, cluster.ray
        self._role, self._log, self._environment = role, log_file, environment
        self._actor, self._gpus = launcher.new_actor(role.name)
        self._answer = self._actor.address.remote()
        self._started, self._next = time.monotonic(), 0.0
        self._told = False
        self._status: int | None = None
        self._killing: tuple[Any, float] | None = None
        self.pid, self.host = 0, ""
        self.identity: ProcessIdentity | None = None

    def poll(self) -> int | None:
        now = time.monotonic()
        if self._status is None and now >= self._next:
            self._next = now + POLL_S
            if self._ray.wait([self._answer], timeout=0)[0]:
                self._hear()
            elif not self._told and not self.host and now - self._started > WAITS_S:
                self._told = True
                log.warning("%s waits for room in the cluster", self._role.name)
        if self._status is None and self._killing is not None:
            answer, asked = self._killing
            if now - asked >= CALL_S or self._ray.wait([answer], timeout=0)[0]:
                self._end(-signal.SIGKILL)
        return self._status

    def _hear(self) -> None:
        """Handle the actor's answer, and send the next request."""
        try:
            answer = self._ray.get(self._answer)
        except self._ray.exceptions.ActorUnavailableError:
            self._answer = self._actor.poll.remote()
        except self._ray.exceptions.RayError as error:
            self._write(f"asyncrl: this role was lost with its node or its actor: {_first_lines(error)}")
            self._end(EXIT_FAILURE)
        else:
            if isinstance(answer, str):
                self.host = answer
                self._launcher.arrived(self._role.name, self._actor, answer)
                self._answer = self._actor.start.remote(
                    self._role.command, str(self._log), self._environment, self._gpus
                )
            elif answer.status is None:
                self.pid, self.identity = answer.pid, answer.identity
                self._answer = self._actor.poll.remote()
            else:
                self._end(answer.status)

    def _write(self, line: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{line}\n")

    def _end(self, status: int) -> None:
        self._status = status
        # The node may only seem to be dead, and the role must not keep running there.
        self._ray.kill(self._actor)

    def terminate(self) -> None:
        if self._status is None and not self.pid:
            self._end(EXIT_STOPPED)
        elif self._status is None:
            self._actor.terminate.remote()
            self._next = 0.0

    def drain(self) -> None:
        if self.pid and self._status is None:
            self._actor.drain.remote()
        else:
            self.terminate()

    def kill(self) -> None:
        if self._status is None and self._killing is None:
            self._killing = self._actor.kill.remote(), time.monotonic()


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:LONGEST_REASON]
