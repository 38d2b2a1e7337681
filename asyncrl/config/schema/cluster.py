"""The hosts and GPUs of a run's processes, and their addresses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.option import option

ROLES = ("replay", "scoring", "actor", "learner")
"""The roles of a run, in the order of starting. An actor has the servers that it starts on its own GPUs."""
MOST = 100_000
"""Hosts, GPUs of one, actors or scorers. A slip of the finger must not keep a run busy with a list of its processes."""
POOL_KEYS = ("nodes", "gpus", "cpus")
"""The keys of a pool: its nodes (1 by default), and the GPUs and CPUs that it has on each of them."""


@dataclass
class RayConfig:
    """The Ray cluster of a run with `cluster.launcher=ray`."""

    address: str | None = option(
        None,
        "address of a Ray cluster; null: RAY_ADDRESS, which a job has, else a new cluster on this machine",
    )
    runtime_env: dict[str, Any] = option(
        {}, "Ray's runtime environment of all roles, such as {env_vars: {NAME: VALUE}}", secret="named"
    )
    replay_resource: str | None = option(
        None,
        "custom resource of the node that has the replay, whose store is on its disk; null: the node on which the run "
        "began, by its address",
    )


@dataclass
class AutoscaleConfig:
    """The numbers of actors and scorers by what limits the run (docs/cluster.md)."""

    actors: list[int] = option([], "least and most actors, as [1, 8]; empty: their number stays", f"[1, {MOST}]")
    scorers: list[int] = option([], "least and most scorers, as [1, 4]; empty: their number stays", f"[1, {MOST}]")
    every_s: float = option(30.0, "seconds between two looks at the metrics", "[1, inf)")
    patience: int = option(3, "looks in a row that must want the same change, which is one process", "[1, inf)")


@dataclass
class SlurmConfig:
    """The job of a run with `cluster.launcher=slurm`, which launchers/slurm_launch.sh sets."""

    interface: str | None = option(
        None,
        "network interface by which the nodes reach each other, such as ib0; null: the one that leads to the address "
        "by which Slurm knows a node",
    )
    srun: list[str] = option([], "more options of each srun, such as [--container-image=FILE]")
    container: list[str] = option(
        [], "words before each command that run it in a container, such as [apptainer, exec, --nv, FILE]"
    )
    python: str | None = option(None, "Python of the roles; null: that of the batch script")


@dataclass
class ClusterConfig:
    """Hosts, pools of their GPUs, and the processes of each role (docs/cluster.md)."""

    launcher: str = option(
        "local",
        "where the processes are started: on this machine, on cluster.hosts, on a Ray cluster, or on the nodes of the "
        "job of Slurm that this process is in",
        choices=("local", "hosts", "ray", "slurm"),
    )
    hosts: list[str] = option([], "names of the hosts of launcher=hosts, as cluster.shell takes them")
    shell: list[str] = option(
        ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8", "{host}"],
        "command that runs its last argument, a shell's command line, on {host}",
    )
    gpus: int | None = option(None, "GPUs of a host that the run uses, the first ones; null: all", f"[0, {MOST}]")
    cpus: int | None = option(None, "CPUs of a host that the run uses; null: all", "[1, inf)")
    pools: dict[str, dict[str, int]] = option(
        {},
        "parts of the hosts, as {train: {nodes: 1, gpus: 4, cpus: 16}}, where gpus and cpus are those of one node; "
        "empty: asyncrl divides the hosts",
        f"[0, {MOST}]",
    )
    roles: dict[str, str] = option(
        {},
        "pool of a role (replay, scoring, actor, learner), as {actor: rollout}; a role that is not named is in the "
        "pool with its own name, or else in the first pool",
    )
    colocated: bool = option(
        False,
        "learner and servers have the same GPUs in turns: synchronous training, with replay.max_lag=0 and with SGLang "
        "servers that the run starts (docs/cluster.md)",
    )
    actors: int | None = option(
        None, "actor processes; null: one on each GPU of an embedded engine, else one on each node", f"[1, {MOST}]"
    )
    scorers: int | None = option(
        None,
        "scoring processes; null: one on each GPU of a pool that has nothing but scorers, else one",
        f"[1, {MOST}]",
    )
    learner_ranks: int | None = option(
        None, "ranks of the learner on each of its hosts; null: one on each GPU that is left for them", "[1, inf)"
    )
    actor_threads: int | None = option(None, "torch threads of one actor; null: a share of the CPUs", "[1, inf)")
    scorer_threads: int | None = option(None, "torch threads of one scorer; null: a share of the CPUs", "[1, inf)")
    learner_threads: int | None = option(
        None, "torch threads of one learner rank; null: a share of the CPUs", "[1, inf)"
    )
    max_restarts: int = option(
        20, "failures of a role that do not end the run; 5 minutes without one reset the count", "[0, inf)"
    )
    restart_pause_s: float = option(
        60.0, "longest pause in seconds before a restart; the first is 0.25 s, and each doubles", "[0, inf)"
    )
    hang_timeout_s: float = option(
        600.0,
        "seconds without a sign of life after which a process hangs, and is killed and started again; the learner's "
        "main thread may stand still for learner.rank_timeout_s, if that is more",
        "[5, inf)",
    )
    drain_s: float = option(
        0.0,
        "seconds that a stop of the run, and `asyncrl scale`, give actors and scorers to finish and deliver the "
        "episodes that they run or score; what is not finished by then is done again later, or by others",
        "[0, inf)",
    )

    def pool_of(self, role: str) -> str:
        """The pool of a role, where there are pools."""
        return self.roles.get(role, role if role in self.pools else next(iter(self.pools)))

    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def ranks(self) -> int:
        """Ranks of the learner on each of its hosts, for a process that was started without a placement, too."""
        return self.learner_ranks or 1


@dataclass
class NetworkConfig:
    """The addresses at which the roles reach each other."""

    host: str = option("127.0.0.1", "address at which replay and learner listen, and to which the others connect")
    replay_host: str | None = option(None, "the replay's address where it is another one; null: network.host")
    learner_host: str | None = option(None, "the learner's address where it is another one; null: network.host")
    replay_port: int = option(5755, "port of the replay's first shard; 0: `asyncrl train` chooses", "[0, 65535]")
    weights_port: int = option(5756, "the learner's port for weights; 0: `asyncrl train` chooses", "[0, 65535]")
    keys: str | None = option(None, "folder of CURVE keys, made by `asyncrl keys`; see docs/security.md", secret="none")
    insecure: bool = option(False, "allow addresses that other machines can reach, without keys")
    max_message_mb: int = option(
        256, "megabytes of the largest message part; a larger one closes its connection", "[1, 4095]"
    )

    @property
    def replay_address(self) -> str:
        """The address at which the replay listens."""
        return self.replay_host or self.host

    @property
    def learner_address(self) -> str:
        """The address at which the learner listens for engines that fetch weights."""
        return self.learner_host or self.host
