"""Defines the pools of a run, and puts the nodes of the pools on hosts.

A node of a pool is a part of a host. `cluster.pools` defines the pools. Without it, a single host is one pool. If there
are several hosts, half of them (rounded down) are a pool for training, and the others are a pool for actors and
scorers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.schema import ClusterConfig
from asyncrl.errors import ConfigError

_PLAN = "to plan without any hosts, write --plan=pools, or --plan=N for N hosts with cluster.gpus and cluster.cpus each"


@dataclass(frozen=True, slots=True)
class Host:
    """The GPUs and CPUs of a host that the run may use."""

    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Node:
    """The `index`-th of the `count` nodes of a pool: some GPUs and CPUs of a host.

    - `host`: the index of the host;
    - `gpus`: the numbers of the node's GPUs on the host;
    - `actors`, `scorers`: the node's shares of the configured numbers of actors and scorers;
    - `actor_weight`, `scorer_weight`: the node's weights among the nodes of the pool, which decide its shares.
    """

    pool: str
    index: int
    count: int
    host: int
    gpus: tuple[int, ...]
    cpus: int
    actors: int = 0
    scorers: int = 0
    actor_weight: int = 0
    scorer_weight: int = 0


def pools_of(
    cluster: ClusterConfig, hosts: int, roles: Collection[str]
) -> tuple[Mapping[str, Mapping[str, int]], Mapping[str, str]]:
    """Return the pools by their names, and the pool of each role."""
    pools = cluster.pools
    if pools:
        return pools, {role: cluster.pool_of(role) for role in roles}
    if hosts == 1:
        return {"all": {}}, dict.fromkeys(roles, "all")
    training = hosts // 2
    rollout = {role for role in ("actor", "scoring") if role in roles}
    pools = {"train": {"nodes": training}, "rollout": {"nodes": hosts - training}}
    return pools, {role: "rollout" if role in rollout else "train" for role in roles}


def packed(pools: Mapping[str, Mapping[str, int]], hosts: Sequence[Host]) -> list[Node]:
    """Put the nodes of the pools on hosts. Nodes of one pool are on different hosts. If possible, nodes of different
    pools are, too. The largest nodes come first, so that smaller nodes do not take the hosts that larger nodes need. A
    pool without a number of GPUs gets the GPUs that all other pools leave on its hosts.
    """
    free, cpus = [host.gpus for host in hosts], [host.cpus for host in hosts]
    inside: list[list[str]] = [[] for _ in hosts]
    chosen: dict[str, list[tuple[int, int, int | None]]] = {}
    problems = []

    def size(name: str) -> tuple[bool, int, int]:
        return "gpus" not in pools[name], -pools[name].get("gpus", 0), -pools[name].get("cpus", 0)

    for name in sorted(pools, key=size):
        pool, chosen[name] = pools[name], []
        gpus, threads = pool.get("gpus"), pool.get("cpus")
        for index in range(pool.get("nodes", 1)):
            fitting = [
                host
                for host in range(len(hosts))
                if name not in inside[host] and free[host] >= (gpus or 0) and cpus[host] >= (threads or 0)
            ]
            if not fitting:
                problems.append(_no_room(pools, name, index, hosts, inside))
                break
            host = min(fitting, key=lambda host: len(inside[host]))
            taken = free[host] if gpus is None else gpus
            chosen[name].append((host, taken, threads))
            free[host], cpus[host] = free[host] - taken, cpus[host] - (threads or 0)
            inside[host].append(name)
    if problems:
        raise ConfigError("\n".join(problems))
    open_pools = [sum("cpus" not in pools[name] for name in names) for names in inside]
    first = [0] * len(hosts)
    nodes: dict[str, list[Node]] = {}
    # The GPUs of a host are numbered in the order of its pools. Pools without a number of GPUs come last.
    for name in sorted(pools, key=lambda name: "gpus" not in pools[name]):
        nodes[name] = []
        for index, (host, taken, threads) in enumerate(chosen[name]):
            numbers = tuple(range(first[host], first[host] + taken))
            own = threads or max(1, cpus[host] // open_pools[host])
            nodes[name].append(Node(name, index, len(chosen[name]), host, numbers, own))
            first[host] += taken
    return [node for name in pools for node in nodes[name]]


def _no_room(
    pools: Mapping[str, Mapping[str, int]],
    name: str,
    index: int,
    hosts: Sequence[Host],
    inside: Sequence[Sequence[str]],
) -> str:
    """Return the reason why no host has room for a node of the pool `name`. `inside` has the names of the pools on each
    host so far."""
    pool = pools[name]
    have = ", or ".join(sorted({f"{host.gpus} GPUs and {host.cpus} CPUs" for host in hosts}))
    node = f"cluster.pools.{name}: node {index + 1} of {pool.get('nodes', 1)} needs"
    there = f"the run has {len(hosts)} host{'s' * (len(hosts) > 1)} with {have}{' each' * (len(hosts) > 1)}"
    if all(name in each for each in inside):
        lacks = f"{node} a host without another node of this pool, and {there}"
        return f"{lacks}; lower its number of nodes, or add hosts; {_PLAN}"
    others = sorted({other for each in inside for other in each if "gpus" in pools[other]} - {name})
    taken = f", of which {' and '.join(f'{other} has {_size(pools[other])}' for other in others)}" if others else ""
    return (
        f"{node} {_size(pool)} on one host, and no host has that much left: {there}{taken}; lower a number, or add "
        f"hosts; {_PLAN}"
    )


def _size(pool: Mapping[str, int]) -> str:
    return " and ".join(f"{pool[key]} {key[:-1].upper()}s" for key in ("gpus", "cpus") if key in pool) or "room"
