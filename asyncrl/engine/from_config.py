"""Opens the engine of the configuration."""

from __future__ import annotations

from dataclasses import replace

from asyncrl.config import locations
from asyncrl.config.schema import ClusterConfig, ModelConfig, RunConfig, TrainConfig, WeightsConfig
from asyncrl.engine.fleet.server import InferenceServer
from asyncrl.engine.fleet.settings import FleetSettings
from asyncrl.engine.fleet.update import CPU
from asyncrl.engine.opening import (
    OpenedEngine,
    ServerSettings,
    ServersSettings,
    open_embedded,
    open_fleet,
    server_opener,
)
from asyncrl.engine.sampling import request_seed
from asyncrl.engine.sglang.families import check_family
from asyncrl.engine.sglang.launch import STOP_S as SERVER_STOP_S
from asyncrl.engine.sglang.routes.opening import ServerRouteSettings
from asyncrl.errors import ConfigError
from asyncrl.machine import process
from asyncrl.machine.gpu_lock import ServersLock
from asyncrl.modelling.opening import open_config, server_overrides
from asyncrl.modelling.routing import routing_shape
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.types import MAX_ROUTING_BYTES
from asyncrl.weights.from_config import route_settings
from asyncrl.weights.nccl import agree_with_servers
from asyncrl.weights.routes import RouteSettings, routes_to_engines

CLOSE_S = process.STOP_S - SERVER_STOP_S - 3.0
"""The maximum seconds that closing a fleet may take. After this, the actor still has time to end its own servers and to
write its last metrics."""


def open_engine(config: TrainConfig, spans: Spans | None = None) -> OpenedEngine:
    """Open the engine of `engine.kind`. `spans` records events of servers. Raises ConfigError: it cannot be opened."""
    engine, weights, model, actor = config.engine, config.weights, config.model, config.actor
    check_family(engine, model)
    if engine.return_routed_experts:
        _check_routing(model, actor.largest_episode, config.network.max_message_mb << 20)
    if engine.kind == "embedded":
        # Without engine.max_length, a slot has room for a whole episode.
        engine = replace(engine, max_length=engine.max_length or actor.max_tokens)
        return open_embedded(model, engine, config.run.seed, keep_cache=weights.mode == "in_place")
    fleet = FleetSettings(
        attempts=engine.attempts,
        wait_s=engine.wait_s,
        check_s=engine.check_s,
        mode=weights.mode,
        drain_s=weights.drain_s,
        canary_s=weights.load_s / 2,
        segment_tokens=engine.segment_tokens,
        close_s=CLOSE_S,
        seed=config.run.seed,
    )
    routes = route_settings(config)
    agree_with_servers(routes)
    each = _server_settings(weights, actor.max_tokens, config.network.insecure)
    at_once = (actor.at_once(config.learner.batch_size), actor.asks_in_parallel)
    servers = _servers_settings(config.run, config.cluster, each, routes, *at_once)
    return open_fleet(model, engine, fleet, servers, spans or NoSpans())


def open_server(config: TrainConfig, url: str) -> InferenceServer:
    """Open the server at `url` as a fleet does, but do not join it. Raises ConfigError: the model cannot be used."""
    policy, overrides = open_config(config.model), server_overrides(config.model)
    settings = _server_settings(config.weights, config.actor.max_tokens, config.network.insecure)
    return server_opener(policy, overrides, config.engine, settings)(url)


def _server_settings(weights: WeightsConfig, context: int, insecure: bool) -> ServerSettings:
    routes = ServerRouteSettings(weights.into_servers, weights.bucket_mb << 20, weights.timeout_s, insecure)
    return ServerSettings(context, weights.load_s, routes)


def _servers_settings(
    run: RunConfig, cluster: ClusterConfig, each: ServerSettings, routes: RouteSettings, episodes: int, parallel: bool
) -> ServersSettings:
    run_dir, locks, name = locations.run_dir(run), locations.gpu_locks(run), process.worker_name("actor")
    by_disk = routes_to_engines(routes, CPU).routes[0].name == "disk"
    return ServersSettings(
        each,
        run=locations.run_identity(run),
        name=name,
        # The actor makes hard links to the learner's files. A hard link must be in the same file system as its file, so
        # the links are made next to the learner's folders.
        folders=(routes.folder / "held" if by_disk else run_dir / "weights").absolute(),
        logs=run_dir / "logs",
        episodes=episodes,
        parallel=parallel,
        # If the servers of two actors had the same seed, they would draw the same random numbers.
        seed=request_seed(run.seed, name),
        gpu_lock=ServersLock(locks, cluster.ranks) if cluster.colocated else None,
    )


def _check_routing(model: ModelConfig, longest: int, most_bytes: int) -> None:
    """Raises ConfigError: `model` has no experts that can be replayed, or the experts of an episode of `longest` tokens
    do not fit into a message of `most_bytes`.
    """
    width = routing_shape(open_config(model)).width
    if width > MAX_ROUTING_BYTES:
        raise ConfigError(
            f"engine.return_routed_experts model.path: the experts of a token take {width} bytes, and at most "
            f"{MAX_ROUTING_BYTES} are supported; set engine.return_routed_experts=false"
        )
    if width * longest > most_bytes:
        raise ConfigError(
            f"engine.return_routed_experts network.max_message_mb: the experts of {longest} tokens take "
            f"{width * longest >> 20} MB, {width} bytes a token; raise network.max_message_mb, or lower "
            "actor.max_tokens or actor.max_total_tokens"
        )
