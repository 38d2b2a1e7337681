"""The hosts and GPUs of a run's processes, and their addresses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.option import option

ROLES = ("replay", "scoring", "actor", "learner")
"""The roles of a run, in the order of starting. The servers that an actor starts count as part of the actor."""
MOST = 100_000
"""The largest number of hosts, GPUs of a host, actors or scorers. So a mistyped number cannot start millions of
processes."""
POOL_KEYS = ("nodes", "gpus", "cpus")
"""The keys of a pool: its nodes (1 by default), and the GPUs and CPUs that it has on each of them."""


@dataclass
class RayConfig:
    """The Ray cluster of a run with `cluster.launcher=ray`."""

    address: str | None = option(
        None,
        "address of a Ray cluster; null: the variable RAY_ADDRESS, which Ray sets in jobs, else a new cluster on this "
        "machine",
    )
    runtime_env: dict[str, Any] = option(
        {}, "Ray's runtime environment of all roles, such as {env_vars: {NAME: VALUE}}", secret="named"
    )
    replay_resource: str | None = option(
        None,
        "custom Ray resource that marks the node for the replay; the store is on this node's disk; null: the node on "
        "which the run began, found by its address",
    )


@dataclass
class AutoscaleConfig:
    """The numbers of actors and scorers, which a run adapts to its bottleneck (docs/cluster.md)."""

    actors: list[int] = option(
        [], "smallest and largest number of actors, as [1, 8]; empty: a fixed number", f"[1, {MOST}]"
    )
    scorers: list[int] = option(
        [], "smallest and largest number of scorers, as [1, 4]; empty: a fixed number", f"[1, {MOST}]"
    )
    every_s: float = option(30.0, "seconds between two checks of the metrics", "[1, inf)")
    patience: int = option(
        3, "number of checks in a row that must agree before one process is added or removed", "[1, inf)"
    )


@dataclass
class SlurmConfig:
    """The Slurm job of a run with `cluster.launcher=slurm`. launchers/slurm_launch.sh sets these keys."""

    interface: str | None = option(
        None,
        "network interface between the nodes, such as ib0; null: the interface on the route to a node's Slurm address",
    )
    srun: list[str] = option([], "further options of each srun, such as [--container-image=FILE]")
    container: list[str] = option(
        [],
        "words that are put before each command so that it runs in a container, such as [apptainer, exec, --nv, FILE]",
    )
    python: str | None = option(None, "Python interpreter of the roles; null: the batch script's interpreter")


@dataclass
class ClusterConfig:
    """Hosts, pools of their GPUs, and the processes of each role (docs/cluster.md)."""

    launcher: str = option(
        "local",
        "machines on which the processes start; local: this machine; hosts: cluster.hosts; ray: a Ray cluster; slurm: "
        "the nodes of the current Slurm job",
        choices=("local", "hosts", "ray", "slurm"),
    )
    hosts: list[str] = option([], "launcher=hosts: the host names, which replace {host} in cluster.shell")
    shell: list[str] = option(
        ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=8", "{host}"],
        "launcher=hosts: a command that runs a shell command line on {host}; the command line is appended as the last "
        "argument",
    )
    gpus: int | None = option(
        None, "number of GPUs that the run uses on each host, counted from the first GPU; null: all", f"[0, {MOST}]"
    )
    cpus: int | None = option(None, "number of CPUs that the run uses on each host; null: all", "[1, inf)")
    pools: dict[str, dict[str, int]] = option(
        {},
        "named parts of the hosts, as {train: {nodes: 1, gpus: 4, cpus: 16}}, with gpus and cpus per node; empty: "
        "asyncrl divides the hosts itself",
        f"[0, {MOST}]",
    )
    roles: dict[str, str] = option(
        {},
        "pool of each role (replay, scoring, actor, learner), as {actor: rollout}; a role that is not listed uses the "
        "pool with its own name, or else the first pool",
    )
    colocated: bool = option(
        False,
        "true: learner and servers take turns on the same GPUs. This needs replay.max_lag=0 (synchronous training) and "
        "SGLang servers that the run starts (docs/cluster.md)",
    )
    actors: int | None = option(
        None,
        "number of actor processes; null: one on each GPU with the embedded engine, else one on each node, or more if "
        "its episodes need more than one core (docs/cluster.md)",
        f"[1, {MOST}]",
    )
    scorers: int | None = option(
        None,
        "number of scoring processes; null: one on each GPU of a pool that only scorers use, else one",
        f"[1, {MOST}]",
    )
    learner_ranks: int | None = option(
        None,
        "number of the learner's ranks on each of its hosts; null: one on each GPU that the placement leaves to the "
        "learner",
        "[1, inf)",
    )
    actor_threads: int | None = option(
        None, "number of torch threads of one actor; null: a share of the CPUs", "[1, inf)"
    )
    scorer_threads: int | None = option(
        None, "number of torch threads of one scorer; null: a share of the CPUs, or 1 if it only runs rules", "[1, inf)"
    )
    learner_threads: int | None = option(
        None, "number of torch threads of one learner rank; null: a share of the CPUs", "[1, inf)"
    )
    max_restarts: int = option(
        20,
        "number of failures of a role that the run survives; the count starts again if the role runs for 5 minutes",
        "[0, inf)",
    )
    restart_pause_s: float = option(
        60.0,
        "longest pause in seconds before a restart; the first pause is 0.25 s, and each next one is twice as long",
        "[0, inf)",
    )
    hang_timeout_s: float = option(
        600.0,
        "a process that sends no heartbeat for this many seconds is killed and started again; the learner's main "
        "thread may take learner.rank_timeout_s if that is longer",
        "[5, inf)",
    )
    drain_s: float = option(
        0.0,
        "seconds that actors and scorers have to finish and deliver their episodes when the run stops, or when "
        "`asyncrl scale` removes these processes; unfinished episodes are run or scored again later",
        "[0, inf)",
    )

    def pool_of(self, role: str) -> str:
        """The pool of a role. `pools` must not be empty."""
        return self.roles.get(role, role if role in self.pools else next(iter(self.pools)))

    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def ranks(self) -> int:
        """The number of the learner's ranks on each of its hosts; 1 for a process that was started without a
        placement."""
        return self.learner_ranks or 1


@dataclass
class NetworkConfig:
    """The addresses at which the roles reach each other."""

    host: str = option(
        "127.0.0.1", "address at which the replay and the learner listen, and to which all other processes connect"
    )
    replay_host: str | None = option(None, "address of the replay, if it differs from network.host; null: network.host")
    learner_host: str | None = option(
        None, "address of the learner, if it differs from network.host; null: network.host"
    )
    replay_port: int = option(5755, "port of the replay's first shard; 0: `asyncrl train` chooses", "[0, 65535]")
    weights_port: int = option(5756, "the learner's port for weights; 0: `asyncrl train` chooses", "[0, 65535]")
    keys: str | None = option(None, "folder of CURVE keys, made by `asyncrl keys`; see docs/security.md", secret="none")
    insecure: bool = option(False, "allow addresses that other machines can reach, even without keys")
    max_message_mb: int = option(
        256, "largest size of one part of a message, in megabytes; a larger part closes its connection", "[1, 4095]"
    )

    @property
    def replay_address(self) -> str:
        """The address at which the replay listens."""
        return self.replay_host or self.host

    @property
    def learner_address(self) -> str:
        """The address at which the learner listens for engines that fetch weights."""
        return self.learner_host or self.host
