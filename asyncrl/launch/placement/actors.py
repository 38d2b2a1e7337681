"""Decides how many actors divide the servers and episodes of a node, if the configuration leaves that open.

An actor is one process, and its event loop has one core. So the turns of its episodes must not need more processor time
than one core has. `benchmarks.turns` measures the processor time of a turn. The number of turns is unknown before a
run, so `actors_needed` assumes many: short turns, on servers that are fast.
"""

from __future__ import annotations

import math

from asyncrl.config.schema import ActorConfig, ClusterConfig, EngineConfig
from asyncrl.launch.placement.placement import Placement

TURN_S, AGENT_TURN_S = 0.42e-3, 1e-3
"""Seconds of processor time that a turn takes in the actor, and that a turn of an agent takes."""
SHORT_TURN = 40
"""The tokens of a short turn, which is a tool call and some words."""
REQUEST_TOKENS_S = 51.0
"""The tokens a second of one request in short turns. Four servers on an H200 gave 512 requests 26,058 tokens/s."""
LOAD = 0.8
"""The share of its core that an actor should use at most."""
CPUS_EACH = 4
"""The number of CPUs that a node must have for each actor. The actor uses one. The others are for its servers, which
use one each, and for other roles."""


def actors_needed(episodes: int, longest_turn: int, by_agent: bool) -> int:
    """The number of actors that `episodes` at once need, with turns of up to `longest_turn` tokens. `by_agent`: an
    agent plays the episodes."""
    turns_per_s = episodes * REQUEST_TOKENS_S / min(SHORT_TURN, longest_turn)
    return max(1, math.ceil(turns_per_s * (AGENT_TURN_S if by_agent else TURN_S) / LOAD))


def settle_actors(
    actor: ActorConfig, cluster: ClusterConfig, engine: EngineConfig, batch_size: int, placement: Placement
) -> str:
    """Set the number of actors and the episodes of each, if the number is open and one actor for each node is not
    enough. Return the reason, or an empty text if nothing was set. The roles must be placed again after a change.

    `placement` has one actor on each node. An actor needs servers of its own, so a node gets at most one actor for each
    GPU, or for each `engine.server.tp_size` GPUs.
    """
    placed = placement.of("actor")
    if not _is_open(cluster, engine, placement) or len({role.servers for role in placed}) != 1:
        return ""
    episodes = actor.at_once(batch_size)
    needed = actors_needed(episodes, actor.max_turn_tokens, actor.played_by is not None)
    room = min(placement.hosts[role.node].cpus for role in placed) // CPUS_EACH
    gpus = placed[0].servers // engine.server.together
    # All actors have equally many GPUs, and no GPU is left over.
    fitting = [number for number in range(1, gpus + 1) if gpus % number == 0 and number <= min(needed, room)]
    each = max(fitting, default=1)
    if each == 1:
        return ""
    cluster.actors, actor.concurrency = each * len(placed), math.ceil(episodes / each)
    return (
        f"{each} actors on each node with servers run {actor.concurrency} episodes at once each: {episodes} episodes "
        f"with short turns need {needed} cores"
    )


def _is_open(cluster: ClusterConfig, engine: EngineConfig, placement: Placement) -> bool:
    """True if the number of actors is not configured, and several may divide the servers."""
    configured = cluster.actors is not None or cluster.autoscale.actors or engine.server.count is not None
    return engine.launches and not configured and not placement.in_turns
