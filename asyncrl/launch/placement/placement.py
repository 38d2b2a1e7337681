"""Places a run's processes on hosts and GPUs. Every launcher obeys the placement.

Each role has a pool of nodes (see `pools`). The roles of a node divide its GPUs (see `dealing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from asyncrl.config.schema import ClusterConfig, EngineConfig, LearnerConfig, ScoringConfig, TrainConfig
from asyncrl.config.schema.cluster import ROLES
from asyncrl.config.schema.scoring import ScoringModelConfig, serves
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.dealing import Wish, deal, memory_shares, shared_servers
from asyncrl.launch.placement.pools import Host, Node, packed, pools_of
from asyncrl.launch.placement.sharing import claim, shares

ROLE_WORDS = {"learner": "learner", "actor": "actor's servers", "scoring": "scorer"}
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


@dataclass(frozen=True, slots=True)
class Demand:
    """The part of the configuration that decides where processes are, and how many there are."""

    cluster: ClusterConfig
    engine: EngineConfig
    learner: LearnerConfig
    scorer_gpus: int
    """The number of GPUs that one scorer uses."""
    rule_processes: int
    """The number of processes in which one scorer runs rules and the function of step rewards."""
    shards: int
    replay_port: int
    weights_port: int
    nccl_into_servers: bool


def place(config: TrainConfig, hosts: Sequence[Host], roles: Collection[str] = ROLES) -> Placement:
    """Place every process of the `roles` of a run. The same arguments give the same placement.

    Raises ConfigError, with a line for each shortage: the hosts have less than the configuration needs.
    """
    demand = Demand(
        config.cluster,
        config.engine,
        config.learner,
        scorer_gpus=_scorer_gpus(config.scoring),
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
                _check_gpus(demand, node, _wishes(demand, node, here))
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
        room = _room(pool, [_scorer_places(demand, node) for node in pool])
        scorers = zip(pool, shares(demand.cluster.scorers or 1, room), room, strict=True)
        pool = [replace(node, scorers=count, scorer_weight=weight) for node, count, weight in scorers]
        room = _room(pool, [_actor_places(demand, node, roles) for node in pool])
        actors = zip(pool, shares(demand.cluster.actors or 0, room), room, strict=True)
        pool = [replace(node, actors=count, actor_weight=weight) for node, count, weight in actors]
        shared |= {(name, node.index): node for node in pool}
    return (shared[node.pool, node.index] for node in nodes)


def _room(pool: Sequence[Node], gpus: Sequence[int]) -> Sequence[int]:
    """Return the weights of the nodes of a pool for a role: the GPUs of each node that the role can use, or the CPUs if
    it uses no GPU."""
    return gpus if any(gpus) else [node.cpus for node in pool]


def _scorer_places(demand: Demand, node: Node) -> int:
    unit = demand.scorer_gpus
    return len(node.gpus) // unit if unit else 0


def _actor_places(demand: Demand, node: Node, roles: Collection[str]) -> int:
    """Return the number of GPUs that actors on the node would have, if the configuration left the number of actors
    open."""
    if demand.engine.names_servers and demand.engine.kind != "embedded":
        return int(node.index == 0)
    freely = replace(demand, cluster=replace(demand.cluster, actors=None))
    try:
        return len(deal(node.gpus, _wishes(freely, node, roles)).get("actor", ()))
    except ConfigError:
        return 0  # The demand is refused later, when the node is placed. The message then names the key to change.


def _wishes(demand: Demand, node: Node, roles: Collection[str]) -> dict[str, Wish]:
    """Return the wishes of the roles for a node's GPUs. A role without a wish uses no GPU."""
    cluster, engine, wishes = demand.cluster, demand.engine, {}
    if "learner" in roles:
        ranks, learner = cluster.learner_ranks, demand.learner
        together = learner.replicas * learner.pass_ranks
        if ranks is None and engine.names_servers and cluster.gpus is None and not cluster.pools:
            ranks = 1  # Servers that the run does not start may be on all other GPUs.
        unit = together // gcd(together, node.count) if ranks is None else 1
        counts = {"learner.context_ranks": learner.context_ranks, "learner.tensor_ranks": learner.tensor_ranks}
        key = next((key for key, count in counts.items() if count > 1), "learner.replicas")
        wishes["learner"] = Wish("cluster.learner_ranks" if ranks else key, unit, ranks)
    if "actor" in roles and (processes := _least_actors(demand, node)):
        if engine.kind == "embedded":
            wishes["actor"] = Wish("cluster.actors", 1, cluster.actors and processes, shares=True)
        elif engine.launches and not engine.server.on_cpu:
            count = engine.server.count
            unit = engine.server.tp_size * (processes if count is None else 1)
            wishes["actor"] = Wish(_servers_key(demand, node, processes), unit, count and count * processes)
    if "scoring" in roles and (unit := demand.scorer_gpus):
        alone = not {"learner", "actor"} & set(roles)
        count = None if alone and cluster.scorers is None else node.scorers
        if count != 0:
            wishes["scoring"] = Wish("scoring.prm.device", unit, count, shares=True)
    return wishes


def _servers_key(demand: Demand, node: Node, actors: int) -> str:
    """Return the option to change if the servers of a node's `actors` do not fit on its GPUs."""
    server = demand.engine.server
    if server.tp_size > len(node.gpus):
        return "engine.server.tp_size"
    if actors > 1:
        return "cluster.actors"
    return "engine.server.tp_size" if server.count is None else "engine.server.count"


def _check_gpus(demand: Demand, node: Node, wishes: Mapping[str, Wish]) -> None:
    """Raise ConfigError if a role needs GPUs and this node of its pool has none. Also raise it if some of the GPUs that
    the pool names would be idle."""
    keys = {"actor": "add --device=cpu to engine.server.arguments", "scoring": "set the device of its models to cpu"}
    pool = f"cluster.pools.{node.pool}" if demand.cluster.pools else f"cluster.pools: host {node.host}"
    without = [role for role in wishes if role != "actor" or demand.engine.launches]
    if without and not node.gpus:
        lines = (
            f"{pool} has no GPU for the {ROLE_WORDS[role]}, and other hosts or pools have some; name one of these in "
            f"cluster.roles{f', or {keys[role]} to have it on the CPU' if role in keys else ''}"
            for role in without
        )
        raise ConfigError("\n".join(lines))
    named = demand.cluster.pools.get(node.pool, {}).get("gpus")
    for wish in wishes.values() if len(wishes) == 1 else ():
        if named and named > wish.unit and wish.count is None and named % wish.unit:
            raise ConfigError(
                f"{pool}: of {named} GPUs a node, {named % wish.unit} would lie idle, since {wish.key} takes "
                f"{wish.unit} at once; name a multiple of {wish.unit}"
            )


def _least_actors(demand: Demand, node: Node) -> int:
    """Return the number of actors on a node, before `_actors` adds some for further GPUs."""
    actors = demand.cluster.actors
    if actors is None and demand.engine.names_servers and demand.engine.kind != "embedded":
        return int(node.index == 0)  # All of the servers belong to one actor.
    return 1 if actors is None else node.actors


def _actors(demand: Demand, node: Node, own: Mapping[str, Sequence[int]]) -> int:
    """Return the number of actors on a node whose roles have the GPUs `own`."""
    least = _least_actors(demand, node)
    return (
        max(least, len(own["actor"])) if demand.engine.kind == "embedded" and demand.cluster.actors is None else least
    )


def _scorers(demand: Demand, node: Node, own: Mapping[str, Sequence[int]]) -> int:
    """Return the number of scorers on a node whose roles have the GPUs `own`."""
    if demand.cluster.scorers is None and {"learner", "actor"}.isdisjoint(own) and own["scoring"]:
        return max(1, len(own["scoring"]) // demand.scorer_gpus)
    return node.scorers


def _scorer_gpus(scoring: ScoringConfig) -> int:
    """Return the number of GPUs that one scorer uses."""
    models: Mapping[str, ScoringModelConfig] = {"prm": scoring.prm, "outcome_model": scoring.outcome_model}
    local = [models[kind] for kind in serves(scoring) if kind in models and _is_local(models[kind])]
    on_gpus = [model for model in local if model.device != "cpu"]
    return max((int(model.device.partition(":")[2] or 0) + model.gpus for model in on_gpus), default=0)


def _is_local(model: ScoringModelConfig) -> bool:
    return not (model.path or "").startswith(("http://", "https://"))


def _placed_on(demand: Demand, node: Node, roles: Collection[str]) -> Iterator[PlacedRole]:
    """Yield the processes of `roles` on a node, before `_numbered` adds numbers to their names."""
    cluster, engine = demand.cluster, demand.engine
    dealt = deal(node.gpus, _wishes(demand, node, roles), cluster.colocated)
    given = {"actor": engine.server.memory if engine.launches else None, "learner": demand.learner.memory}
    shares = {role: share for role, share in given.items() if share is not None}
    memory = memory_shares(dealt, shares, cluster.colocated)
    own = {role: dealt.get(role, ()) for role in roles}
    counts = {
        "scoring": _scorers(demand, node, own) if "scoring" in roles else 0,
        "actor": _actors(demand, node, own) if "actor" in roles else 0,
        "learner": (cluster.learner_ranks or max(1, len(own["learner"]))) if "learner" in roles else 0,
    }
    threads = min(MOST_THREADS, max(1, node.cpus // max(1, sum(counts.values()))))
    if "replay" in roles and node.index == 0:
        for shard in range(demand.shards):
            which = (f"replay.shard={shard}",) if demand.shards > 1 else ()
            port = demand.replay_port and demand.replay_port + shard
            yield PlacedRole("replay", "replay", which, node.pool, node.host, (), 1, 1, port)
    for index in range(counts["scoring"]):
        gpus, torch = _part(own["scoring"], index, demand.scorer_gpus), cluster.scorer_threads or threads
        cpus = torch + demand.rule_processes
        yield PlacedRole("scoring", "scoring", (), node.pool, node.host, gpus, torch, cpus)
    for index in range(counts["actor"]):
        torch = cluster.actor_threads or threads
        gpus = _part(own["actor"], index, max(1, len(own["actor"]) // counts["actor"]))
        actor = PlacedRole("actor", "actor", (), node.pool, node.host, gpus, torch, torch)
        if engine.launches:
            servers = engine.server.count or max(1, len(gpus) // engine.server.tp_size)
            port = engine.server.port and engine.server.port + index * servers
            arguments = [f"engine.server.count={servers}", *([f"engine.server.port={port}"] if port else [])]
            if "actor" in memory:
                arguments += [f"engine.server.memory={memory['actor']}"]
                shared = shared_servers(own, gpus, engine.server.tp_size, servers)
                # A configured share is for every server, even for a server that shares its GPUs with no other role.
                if engine.server.memory is None and len(shared) < servers:
                    arguments += [f"engine.server.shared=[{','.join(map(str, shared))}]"]
            spare = _nccl_gpu(gpus, own.get("learner", ())) if demand.nccl_into_servers else ()
            actor = replace(actor, arguments=tuple(arguments), gpus=(*gpus, *spare), port=port)
        elif engine.kind != "embedded":
            actor = replace(actor, gpus=None)
        yield actor
    if "learner" in roles:
        arguments = [f"learner.node={node.index}"] if node.count > 1 else []
        arguments += [f"learner.memory={memory['learner']}"] if "learner" in memory else []
        torch = cluster.learner_threads or threads
        yield PlacedRole(
            *("learner", "learner", tuple(arguments), node.pool, node.host, own["learner"]),
            threads=torch,
            cpus=torch * counts["learner"],
            port=None if node.index else demand.weights_port,
        )


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
