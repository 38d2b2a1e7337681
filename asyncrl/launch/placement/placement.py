"""Places a run's processes on hosts and GPUs. Every launcher obeys the placement.

Each role has a pool of nodes (see `pools`). The roles of a node want GPUs (see `demand`) and divide them (see
`dealing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from asyncrl.config.schema import ClusterConfig, LearnerConfig, TrainConfig
from asyncrl.config.schema.cluster import ROLES
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.dealing import deal, memory_shares, shared_servers
from asyncrl.launch.placement.demand import (
    Demand,
    actor_places,
    actors_on,
    check_gpus,
    gpus_of_scorer,
    scorer_computes,
    scorer_places,
    scorers_on,
    wishes_of,
)
from asyncrl.launch.placement.pools import Host, Node, packed, pools_of
from asyncrl.launch.placement.sharing import claim, shares

MOST_THREADS = 16
"""More threads of one process gain little."""


@dataclass(frozen=True, slots=True)
class PlacedRole:
    """A process of the run. Its command is the same on every host: `python -m asyncrl.MODULE experiment=RUN/config.yaml
    ARGUMENTS`.

    - `node`: the index of the host;
    - `gpus`: the numbers of its GPUs on the host. `None`: the process sees all GPUs, because servers that the run did
      not start may use any of them;
    - `threads`: torch's number of threads. The learner's process starts a rank for each GPU, or `cluster.learner_ranks`
      ranks, and each rank has this number of threads;
    - `cpus`: the number of CPUs that the process keeps busy.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    pool: str
    node: int
    gpus: tuple[int, ...] | None
    threads: int
    cpus: int
    port: int | None = None
    """The first port at which others reach this process; 0: chosen at the start; `None`: it does not listen."""
    servers: int = 0
    """The number of servers that this process starts."""


@dataclass(frozen=True, slots=True)
class Placement:
    """All processes of a run on `hosts`, in the order of starting."""

    hosts: tuple[Host, ...]
    roles: tuple[PlacedRole, ...]
    in_turns: bool = False
    """True if the learner and the actors' servers take turns on their GPUs."""

    def of(self, module: str) -> list[PlacedRole]:
        """Return the processes of one role."""
        return [role for role in self.roles if role.module == module]


def place(config: TrainConfig, hosts: Sequence[Host], roles: Collection[str] = ROLES) -> Placement:
    """Place every process of the `roles` of a run. The same arguments give the same placement.

    Raises ConfigError, with a line for each shortage: the hosts have less than the configuration needs.
    """
    demand = Demand(
        config.cluster,
        config.engine,
        config.learner,
        scorer_gpus=gpus_of_scorer(config.scoring),
        scorer_computes=scorer_computes(config.scoring),
        rule_processes=config.scoring.rule_processes * (1 if config.scoring.steps is None else 2),
        shards=config.replay.shards,
        replay_port=config.network.replay_port,
        weights_port=config.network.weights_port,
        nccl_into_servers=config.weights.into_servers == "nccl",
    )
    return _place(demand, hosts, roles)


def _place(demand: Demand, hosts: Sequence[Host], roles: Collection[str]) -> Placement:
    pools, pool_of = pools_of(demand.cluster, len(hosts), roles)
    placed: list[PlacedRole] = []
    problems: list[str] = []
    weights: dict[tuple[str, str, int], int] = {}
    for node in _shared(demand, packed(pools, hosts), pool_of):
        weights["actor", node.pool, node.host] = node.actor_weight
        weights["scoring", node.pool, node.host] = node.scorer_weight
        here = [role for role in ROLES if role in roles and pool_of[role] == node.pool]
        try:
            if any(host.gpus for host in hosts):
                check_gpus(demand, node, wishes_of(demand, node, here))
            placed += _placed_on(demand, node, here)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    least, most = _ranks(placed)
    if least < most or (least and demand.cluster.learner_ranks is None):
        # Every host of the learner gets as many ranks as the host with the fewest. `settle` later sets this number in
        # the configuration, so that further placements of the run give the same actors.
        return _place(replace(demand, cluster=replace(demand.cluster, learner_ranks=least)), hosts, roles)
    if demand.cluster.colocated and len({role.node for role in placed if role.module in ("actor", "learner")}) > 1:
        raise ConfigError(
            "cluster.colocated: learner and servers must be on one host; name one host, or put both into one pool "
            "of one node"
        )
    return Placement(tuple(hosts), tuple(_numbered(demand, list(_in_order(placed, weights)))), demand.cluster.colocated)


def _in_order(placed: Sequence[PlacedRole], weights: Mapping[tuple[str, str, int], int]) -> Iterator[PlacedRole]:
    """Yield the roles in the order of starting. Actors and scorers are in the order in which `sharing.shares` deals
    them to nodes with these `weights`. So adding actors or scorers keeps the number and the node of each earlier
    process."""
    for module in ROLES:
        here: Counter[tuple[str, int]] = Counter()
        claims: list[tuple[tuple[bool, float, int], PlacedRole]] = []
        for role in [role for role in placed if role.module == module]:
            weight = weights.get((module, role.pool, role.node), 0)
            claims.append((claim(here[role.pool, role.node], weight), role))
            here[role.pool, role.node] += 1
        if module in ("actor", "scoring"):
            claims.sort(key=lambda each: each[0], reverse=True)
        yield from (role for _, role in claims)


def check_unmoved(before: Placement, after: Placement) -> None:
    """Raise ConfigError if a process that is in both placements would get other GPUs."""
    where = {role.name: (role.node, role.gpus) for role in before.roles}
    now = {role.name: (role.node, role.gpus) for role in after.roles}
    if moved := [name for name in where if name in now and where[name] != now[name]]:
        raise ConfigError(
            f"{', '.join(moved)} would have other GPUs, which needs a restart: stop the run, and start it with these "
            "numbers"
        )


def _ranks(placed: Sequence[PlacedRole]) -> tuple[int, int]:
    """Return the fewest and the most GPUs that the learner has on one of its hosts."""
    counts = [len(role.gpus or ()) for role in placed if role.module == "learner"]
    return min(counts, default=0), max(counts, default=0)


def settle(cluster: ClusterConfig, learner: LearnerConfig, placement: Placement) -> None:
    """Set the numbers of processes that the configuration leaves open, since all roles must know the same numbers.

    Raises ConfigError: the learner would wait for hosts on which nothing is started.
    """
    learners = placement.of("learner")
    nodes = learner.nodes
    if cluster.launcher != "local" and nodes not in (1, len(learners)):
        raise ConfigError(
            f"learner.nodes={nodes}: the learner has {len(learners)} of {len(placement.hosts)} hosts; set it to 1, and "
            "set the number of hosts in the learner's pool: cluster.pools={NAME: {nodes: N}}"
        )
    cluster.actors = len(placement.of("actor")) or cluster.actors
    cluster.scorers = len(placement.of("scoring")) or cluster.scorers
    if learners:
        cluster.learner_ranks = cluster.learner_ranks or max(1, len(learners[0].gpus or ()))
        learner.nodes = max(nodes, len(learners))


def _shared(demand: Demand, nodes: Sequence[Node], pool_of: Mapping[str, str]) -> Iterator[Node]:
    """Yield the nodes with their shares of the configured actors and scorers."""
    pools = {node.pool: [each for each in nodes if each.pool == node.pool] for node in nodes}
    shared: dict[tuple[str, int], Node] = {}
    for name, pool in pools.items():
        roles = [role for role, where in pool_of.items() if where == name]
        room = _room(pool, [scorer_places(demand, node) for node in pool])
        scorers = zip(pool, shares(demand.cluster.scorers or 1, room), room, strict=True)
        pool = [replace(node, scorers=count, scorer_weight=weight) for node, count, weight in scorers]
        room = _room(pool, [actor_places(demand, node, roles) for node in pool])
        actors = zip(pool, shares(demand.cluster.actors or 0, room), room, strict=True)
        pool = [replace(node, actors=count, actor_weight=weight) for node, count, weight in actors]
        shared |= {(name, node.index): node for node in pool}
    return (shared[node.pool, node.index] for node in nodes)


def _room(pool: Sequence[Node], gpus: Sequence[int]) -> Sequence[int]:
    """Return the weights of the nodes of a pool for a role: the GPUs of each node that the role can use, or the CPUs if
    it uses no GPU."""
    return gpus if any(gpus) else [node.cpus for node in pool]


def _placed_on(demand: Demand, node: Node, roles: Collection[str]) -> Iterator[PlacedRole]:
    """Yield the processes of `roles` on a node, before `_numbered` adds numbers to their names."""
    cluster, engine = demand.cluster, demand.engine
    dealt = deal(node.gpus, wishes_of(demand, node, roles), cluster.colocated)
    given = {"actor": engine.server.memory if engine.launches else None, "learner": demand.learner.memory}
    shares = {role: share for role, share in given.items() if share is not None}
    memory = memory_shares(dealt, shares, cluster.colocated)
    own = {role: dealt.get(role, ()) for role in roles}
    counts = {
        "scoring": scorers_on(demand, node, own) if "scoring" in roles else 0,
        "actor": actors_on(demand, node, own) if "actor" in roles else 0,
        "learner": (cluster.learner_ranks or max(1, len(own["learner"]))) if "learner" in roles else 0,
    }
    threads = _threads(node.cpus, counts, demand)
    if "replay" in roles and node.index == 0:
        for shard in range(demand.shards):
            which = (f"replay.shard={shard}",) if demand.shards > 1 else ()
            port = demand.replay_port and demand.replay_port + shard
            yield PlacedRole("replay", "replay", which, node.pool, node.host, (), 1, 1, port)
    for index in range(counts["scoring"]):
        gpus, torch = _part(own["scoring"], index, demand.scorer_gpus), cluster.scorer_threads or threads["scoring"]
        cpus = torch + demand.rule_processes
        yield PlacedRole("scoring", "scoring", (), node.pool, node.host, gpus, torch, cpus)
    for index in range(counts["actor"]):
        torch = cluster.actor_threads or threads["actor"]
        gpus = _part(own["actor"], index, max(1, len(own["actor"]) // counts["actor"]))
        actor = PlacedRole("actor", "actor", (), node.pool, node.host, gpus, torch, torch)
        if engine.launches:
            servers = engine.server.count or max(1, len(gpus) // engine.server.tp_size) * engine.server.together
            port = engine.server.port and engine.server.port + index * servers
            arguments = [f"engine.server.count={servers}", *([f"engine.server.port={port}"] if port else [])]
            if "actor" in memory:
                shared = shared_servers(own, gpus, engine.server.first_gpu, engine.server.tp_size, servers)
                # A configured share is for every server, even for a server that shares its GPUs with no other role.
                if shared or engine.server.memory is not None:
                    arguments += [f"engine.server.memory={memory['actor']}"]
                if shared and engine.server.memory is None and len(shared) < servers:
                    arguments += [f"engine.server.shared=[{','.join(map(str, shared))}]"]
            spare = _nccl_gpu(gpus, own.get("learner", ())) if demand.nccl_into_servers else ()
            actor = replace(actor, arguments=tuple(arguments), gpus=(*gpus, *spare), port=port, servers=servers)
        elif engine.kind != "embedded":
            actor = replace(actor, gpus=None)
        yield actor
    if "learner" in roles:
        arguments = [f"learner.node={node.index}"] if node.count > 1 else []
        arguments += [f"learner.memory={memory['learner']}"] if "learner" in memory else []
        torch = cluster.learner_threads or threads["learner"]
        yield PlacedRole(
            *("learner", "learner", tuple(arguments), node.pool, node.host, own["learner"]),
            threads=torch,
            cpus=torch * counts["learner"],
            port=None if node.index else demand.weights_port,
        )


def _threads(cpus: int, counts: Mapping[str, int], demand: Demand) -> dict[str, int]:
    """Return torch's number of threads for a process of each role of a node: an equal share of its CPUs. `counts` has
    the numbers of processes, ranks of the learner included.

    A scorer that only runs rules gets one thread, and the others share the CPUs that it and its rules leave.
    """
    counts = dict(counts)
    if not demand.scorer_computes:
        cpus -= counts.pop("scoring") * (1 + demand.rule_processes)
    share = min(MOST_THREADS, max(1, cpus // max(1, sum(counts.values()))))
    return {"scoring": 1} | dict.fromkeys(counts, share)


def _nccl_gpu(servers: Sequence[int], learner: Sequence[int]) -> Sequence[int]:
    """Return the GPU from which NCCL sends weights to an actor's servers, which are on the GPUs `servers`. It is none
    of these GPUs, because NCCL allows no two ranks on one GPU.

    Raises ConfigError: the servers use every GPU of the learner on this host.
    """
    spare = [gpu for gpu in learner if gpu not in servers][:1]
    if servers and not spare:
        raise ConfigError(
            "weights.into_servers=nccl needs a GPU of the learner that no server uses, on the host of the servers; set "
            "auto or ipc, or give the learner a GPU of its own there"
        )
    return spare or learner[:1]


def _part(gpus: Sequence[int], index: int, size: int) -> tuple[int, ...]:
    """Return the GPUs of the `index`-th process that takes `size` of `gpus`. Processes share GPUs if there are too
    few."""
    parts = len(gpus) // size if size else 0
    return tuple(gpus[index % parts * size :][:size]) if parts else ()


def _numbered(demand: Demand, roles: Sequence[PlacedRole]) -> Iterator[PlacedRole]:
    """Yield the roles with unique names, which stay the same over restarts."""
    seen: Counter[str] = Counter()
    for role in roles:
        number, only = seen[role.module], role.module == "replay" and demand.shards == 1
        seen[role.module] += 1
        if role.module == "learner":
            yield replace(role, name=f"learner-node-{number}") if number else role
        else:
            yield role if only else replace(role, name=f"{role.module}-{number}")
