"""The combinations of options that cannot work, for the hosts and the addresses of a run's processes."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from asyncrl.config.bind import GROUP_FIX, HOSTS_FIX, KEYS_FIX, SERVER_GROUP_FIX, is_loopback
from asyncrl.config.schema import (
    ClusterConfig,
    EngineConfig,
    LearnerConfig,
    NetworkConfig,
    ReplayConfig,
    WeightsConfig,
)
from asyncrl.config.schema.cluster import POOL_KEYS, ROLES

EVERY_INTERFACE = frozenset({"0.0.0.0", "::", "*"})
ONE_HOST = "learner.nodes: learner.nodes is 1; set the first to null, or the second to the number of hosts"


def cluster_conflicts(cluster: ClusterConfig) -> Iterator[str]:
    """The reasons why pools, hosts and roles do not fit together."""
    pools, roles = cluster.pools, cluster.roles
    if cluster.launcher == "hosts" and not cluster.hosts:
        yield "cluster.hosts: cluster.launcher=hosts needs names of hosts; set cluster.hosts=[gpu1,gpu2]"
    elif cluster.hosts and cluster.launcher != "hosts":
        yield "cluster.launcher cluster.hosts: nothing would start on these hosts; set cluster.launcher=hosts"
    if cluster.ray.address is not None and cluster.launcher != "ray":
        yield (
            "cluster.ray.address cluster.launcher: the Ray cluster would not be used; set cluster.launcher=ray, or "
            "cluster.ray.address=null"
        )
    if twice := sorted({name for name in cluster.hosts if cluster.hosts.count(name) > 1}):
        yield f"cluster.hosts: listed twice, so that their GPUs would count twice: {', '.join(twice)}; name each once"
    if unreachable := [name for name in cluster.hosts if not name.strip() or name.startswith("-")]:
        yield f"cluster.hosts: not the name of a host: {', '.join(map(repr, unreachable))}; leave this out"
    for name, bounds in (("actors", cluster.autoscale.actors), ("scorers", cluster.autoscale.scorers)):
        if bounds and (len(bounds) != 2 or bounds[0] > bounds[1]):
            yield f"cluster.autoscale.{name}: give the smallest and the largest number, such as [1, 8]"
    for name, pool in pools.items():
        if unknown := sorted(pool.keys() - set(POOL_KEYS)):
            yield f"cluster.pools: the pool {name} has an unknown key {unknown[0]}; use {', '.join(POOL_KEYS)}"
        if 0 in (pool.get("nodes"), pool.get("cpus")):
            yield f"cluster.pools: {name} needs at least one node and one CPU"
    for role, name in roles.items():
        if role not in ROLES:
            yield f"cluster.roles: there is no role {role}; use {', '.join(ROLES)}"
        if name not in pools:
            known = f"use {', '.join(pools)}" if pools else "cluster.pools is empty"
            yield f"cluster.roles: {role} is in the pool {name}, which does not exist; {known}"
    inhabited = {cluster.pool_of(role) for role in ROLES} if pools else set()
    for name in [each for each in pools if each not in inhabited]:
        yield f"cluster.pools: no role uses the pool {name}; give it a role in cluster.roles, such as {{actor: {name}}}"


def colocation_conflicts(
    cluster: ClusterConfig, engine: EngineConfig, replay: ReplayConfig, weights: WeightsConfig, nodes: int
) -> Iterator[str]:
    """The reasons why the learner and the servers cannot use the same GPUs alternately. The learner runs on `nodes`
    nodes."""
    if engine.kind == "embedded":
        yield (
            "engine.kind cluster.colocated: an embedded engine cannot free its memory; use sglang, or set "
            "cluster.colocated=false and replay.max_lag=0 for synchronous training"
        )
    elif engine.kind != "sglang":
        yield (
            "engine.kind cluster.colocated: only SGLang servers that the run starts can take turns with the learner; "
            "use sglang, or set cluster.colocated=false"
        )
    elif not engine.launches:
        yield (
            "engine.launch cluster.colocated: the run must start the servers; set the first to true, and name no "
            "servers"
        )
    if engine.server.together > 1:
        yield "engine.server.per_gpu cluster.colocated: one server takes turns with the learner on each GPU; set 1"
    if replay.max_lag != 0:
        yield "replay.max_lag cluster.colocated: nothing is sampled while the learner trains; set 0"
    if replay.source is not None:
        yield "cluster.colocated replay.source: a stored run needs no servers; set the first to false"
    if weights.to_engines == "distributed":
        yield "weights.to_engines cluster.colocated: learner and actor never hold GPUs at the same time; use auto"
    if weights.into_servers == "nccl":
        yield (
            "weights.into_servers cluster.colocated: the actor sends with NCCL from a GPU without a server, and there "
            "is none; use auto"
        )
    if nodes > 1:
        yield "learner.nodes cluster.colocated: learner and servers must be on one host; set 1"
    if cluster.pools and cluster.pool_of("actor") != cluster.pool_of("learner"):
        yield "cluster.roles cluster.colocated: learner and servers share GPUs; put both roles into one pool"


def hosts_conflicts(learner: LearnerConfig, network: NetworkConfig) -> Iterator[str]:
    """The reasons why the hosts of a learner cannot connect to each other."""
    if learner.node >= learner.nodes:
        yield f"learner.node learner.nodes: hosts are numbered from 0 to {learner.nodes - 1}"
    if learner.nodes == 1:
        if learner.rendezvous is not None:
            yield f"learner.rendezvous {ONE_HOST}"
        if learner.interface is not None:
            yield f"learner.interface {ONE_HOST}"
        return
    host, _, port = (learner.rendezvous or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        yield "learner.rendezvous learner.nodes: give an address of host 0 and a free port on it, such as 10.0.0.1:5757"
    elif not (is_local := is_loopback(host.strip("[]"))) and not network.insecure:
        yield f"network.insecure: the learner is on {learner.nodes} hosts, and {HOSTS_FIX}"
    elif not network.replay_port:
        yield "network.replay_port learner.nodes: the other hosts must know the port; set a fixed port"
    elif not is_local and is_loopback(network.replay_address):
        yield (
            f"{_key(network.replay_host, 'replay')} learner.rendezvous: other hosts must reach the replay; set an "
            "address of host 0"
        )


def weights_conflicts(weights: WeightsConfig, engine: EngineConfig, network: NetworkConfig) -> Iterator[str]:
    """The reasons why weights do not reach the engines, or why other machines could reach the weights."""
    if weights.to_engines == "distributed" and not is_loopback(network.learner_address) and not network.insecure:
        key = _key(network.learner_host, "learner")
        yield f"weights.to_engines {key}: other machines can reach this address: {GROUP_FIX}"
    if engine.kind == "vllm" and weights.into_servers not in ("auto", "disk"):
        yield "weights.into_servers engine.kind: vLLM takes weights from a folder only; use auto"
    away = not all(map(_is_here, engine.urls))
    if weights.into_servers in ("nccl", "gloo") and away and not network.insecure:
        yield f"weights.into_servers engine.urls: other machines can reach a server's address: {SERVER_GROUP_FIX}"


def network_conflicts(network: NetworkConfig, shards: int, makes_keys: bool) -> Iterator[str]:
    """The ports that overlap or are too large, and the addresses that other machines could reach without a key. With
    `makes_keys` the launcher makes keys for such addresses."""
    addresses = {
        _key(network.replay_host, "replay"): network.replay_address,
        _key(network.learner_host, "learner"): network.learner_address,
    }
    for key, address in addresses.items():
        if not is_loopback(address) and network.keys is None and not (network.insecure or makes_keys):
            yield f"{key}: other machines can reach this address: {KEYS_FIX}"
    first, weights = network.replay_port, network.weights_port
    together = _overlap(network.replay_address, network.learner_address)
    if together and first and weights in range(first, first + shards):
        yield "network.weights_port network.replay_port: the replay listens there; name another port"
    if first + shards > 65536:
        yield "network.replay_port replay.shards: each shard takes the next port, up to 65535; lower the first key"


def _is_here(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        # A broken address is refused where it is opened.
        return False


def _overlap(one: str, other: str) -> bool:
    """True if the addresses are of one interface, or one of them means all interfaces."""
    return one == other or bool({one, other} & EVERY_INTERFACE) or (is_loopback(one) and is_loopback(other))


def _key(own_host: str | None, role: str) -> str:
    """The key that sets the address at which a role listens."""
    return "network.host" if own_host is None else f"network.{role}_host"
