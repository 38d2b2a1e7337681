"""The GPUs and processes that each role of a run wants on a node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from asyncrl.config.schema import ClusterConfig, EngineConfig, LearnerConfig, ScoringConfig
from asyncrl.config.schema.scoring import GROUP_KIND, ScoringModelConfig, serves
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.dealing import Wish, deal
from asyncrl.launch.placement.pools import Node

ROLE_WORDS = {"learner": "learner", "actor": "actor's servers", "scoring": "scorer"}


@dataclass(frozen=True, slots=True)
class Demand:
    """The part of the configuration that decides where processes are, and how many there are."""

    cluster: ClusterConfig
    engine: EngineConfig
    learner: LearnerConfig
    scorer_gpus: int
    """The number of GPUs that one scorer uses."""
    scorer_computes: bool
    """True if a scorer runs a model or a reward manager, which gain from threads. Rules run in processes of their
    own."""
    rule_processes: int
    """The number of processes in which one scorer runs rules and the function of step rewards."""
    shards: int
    replay_port: int
    weights_port: int
    nccl_into_servers: bool


def scorer_places(demand: Demand, node: Node) -> int:
    unit = demand.scorer_gpus
    return len(node.gpus) // unit if unit else 0


def actor_places(demand: Demand, node: Node, roles: Collection[str]) -> int:
    """Return the number of GPUs that actors on the node would have, if the configuration left the number of actors
    open."""
    if demand.engine.names_servers and demand.engine.kind != "embedded":
        return int(node.index == 0)
    freely = replace(demand, cluster=replace(demand.cluster, actors=None))
    try:
        return len(deal(node.gpus, wishes_of(freely, node, roles)).get("actor", ()))
    except ConfigError:
        return 0  # The demand is refused later, when the node is placed. The message then names the key to change.


def wishes_of(demand: Demand, node: Node, roles: Collection[str]) -> dict[str, Wish]:
    """Return the wishes of the roles for a node's GPUs. A role without a wish uses no GPU."""
    cluster, engine, wishes = demand.cluster, demand.engine, {}
    if "learner" in roles:
        ranks, learner = cluster.learner_ranks, demand.learner
        together = learner.replicas * learner.pass_ranks
        away = engine.names_servers and engine.kind != "embedded"
        if ranks is None and away and cluster.gpus is None and not cluster.pools:
            ranks = 1  # Servers that the run does not start may use all other GPUs.
        unit = together // gcd(together, node.count) if ranks is None else 1
        counts = {"learner.context_ranks": learner.context_ranks, "learner.tensor_ranks": learner.tensor_ranks}
        key = next((key for key, count in counts.items() if count > 1), "learner.replicas")
        wishes["learner"] = Wish("cluster.learner_ranks" if ranks else key, unit, ranks)
    if "actor" in roles and (processes := _least_actors(demand, node)):
        if engine.kind == "embedded":
            wishes["actor"] = Wish("cluster.actors", 1, cluster.actors and processes, shares=True)
        elif engine.launches and not engine.server.on_cpu:
            own = engine.server
            count = None if own.count is None else own.gpus_of(own.count) // own.tp_size
            unit = own.tp_size * (processes if count is None else 1)
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


def check_gpus(demand: Demand, node: Node, wishes: Mapping[str, Wish]) -> None:
    """Raise ConfigError if a role needs GPUs and this node of its pool has none. Also raise it if some of the GPUs that
    the pool names would be idle."""
    keys = {"actor": "add --device=cpu to engine.server.arguments", "scoring": "set the device of its models to cpu"}
    pool = f"cluster.pools.{node.pool}" if demand.cluster.pools else f"cluster.pools: host {node.host}"
    without = [role for role in wishes if role != "actor" or demand.engine.launches]
    if without and not node.gpus:
        lines = (
            f"{pool} has no GPU for the {ROLE_WORDS[role]}, and other hosts or pools have some; name one of these in "
            f"cluster.roles{f', or {keys[role]} to run on the CPU' if role in keys else ''}"
            for role in without
        )
        raise ConfigError("\n".join(lines))
    named = demand.cluster.pools.get(node.pool, {}).get("gpus")
    for wish in wishes.values() if len(wishes) == 1 else ():
        if named and named > wish.unit and wish.count is None and named % wish.unit:
            raise ConfigError(
                f"{pool}: of {named} GPUs per node, {named % wish.unit} would be idle, since {wish.key} uses GPUs in "
                f"multiples of {wish.unit}; name such a multiple"
            )


def _least_actors(demand: Demand, node: Node) -> int:
    """Return the number of actors on a node, before `actors_on` adds some for further GPUs."""
    actors = demand.cluster.actors
    if actors is None and demand.engine.names_servers and demand.engine.kind != "embedded":
        return int(node.index == 0)  # All of the servers belong to one actor.
    return 1 if actors is None else node.actors


def actors_on(demand: Demand, node: Node, own: Mapping[str, Sequence[int]]) -> int:
    """Return the number of actors on a node whose roles have the GPUs `own`."""
    least = _least_actors(demand, node)
    return (
        max(least, len(own["actor"])) if demand.engine.kind == "embedded" and demand.cluster.actors is None else least
    )


def scorers_on(demand: Demand, node: Node, own: Mapping[str, Sequence[int]]) -> int:
    """Return the number of scorers on a node whose roles have the GPUs `own`."""
    if demand.cluster.scorers is None and {"learner", "actor"}.isdisjoint(own) and own["scoring"]:
        return max(1, len(own["scoring"]) // demand.scorer_gpus)
    return node.scorers


def gpus_of_scorer(scoring: ScoringConfig) -> int:
    """Return the number of GPUs that one scorer uses."""
    on_gpus = [model for model in _local_models(scoring) if model.device != "cpu"]
    return max((int(model.device.partition(":")[2] or 0) + model.gpus for model in on_gpus), default=0)


def scorer_computes(scoring: ScoringConfig) -> bool:
    """True if a scorer computes in its own threads: it runs a model, or a reward manager."""
    return bool(_local_models(scoring)) or GROUP_KIND in serves(scoring)


def _local_models(scoring: ScoringConfig) -> list[ScoringModelConfig]:
    """The models that a scorer runs itself, not over HTTP."""
    models: Mapping[str, ScoringModelConfig] = {"prm": scoring.prm, "outcome_model": scoring.outcome_model}
    return [models[kind] for kind in serves(scoring) if kind in models and _is_local(models[kind])]


def _is_local(model: ScoringModelConfig) -> bool:
    return not (model.path or "").startswith(("http://", "https://"))
