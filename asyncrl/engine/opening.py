"""The engine that the configuration names; this file alone knows all kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from asyncrl.config import locations
from asyncrl.config.schema import TrainConfig
from asyncrl.engine.base import Engine
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.fleet.colocation import ServerTurns
from asyncrl.engine.fleet.discovery import Discovery, behind_router, in_file, listed
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.fleet.server import InferenceServer
from asyncrl.engine.fleet.settings import FleetSettings
from asyncrl.engine.fleet.update import CPU
from asyncrl.engine.sglang.families import check_family
from asyncrl.engine.sglang.launch import STOP_S as SERVER_STOP_S
from asyncrl.engine.sglang.launch import LaunchedServer, server_command, server_count
from asyncrl.engine.sglang.server import SglangServer
from asyncrl.engine.vllm.server import VllmServer
from asyncrl.errors import ConfigError
from asyncrl.machine import process
from asyncrl.machine.gpu_lock import ServersLock
from asyncrl.machine.ports import free_ports
from asyncrl.modelling.opening import open_config, reads_images
from asyncrl.modelling.routing import routing_shape
from asyncrl.modelling.shapes import model_shapes
from asyncrl.modelling.vision import vision_shape
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.types import MAX_ROUTING_BYTES
from asyncrl.weights.channels.opening import choose_channel, weights_dir
from asyncrl.weights.group import agree_with_servers

CLOSE_S = process.STOP_S - SERVER_STOP_S - 3.0
"""Leaves the actor time to end its own servers and to write its last metrics."""
SERVERS: Mapping[str, Callable[[TrainConfig, str], InferenceServer]] = {
    "sglang": SglangServer.of,
    "vllm": VllmServer.of,
}


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine that is ready.

    `expected` has names and shapes of the tensors of an update. Each of `keepers` must run as long as the engine is
    used; it returns only by cancellation, or raises the error that ends the actor. `respond` returns if the part of the
    engine that is in this process goes on.
    """

    engine: Engine
    expected: Mapping[str, tuple[int, ...]]
    respond: Callable[[], Awaitable[None]]
    keepers: Sequence[Callable[[], Awaitable[None]]] = ()


def open_engine(config: TrainConfig, spans: Spans | None = None) -> OpenedEngine:
    """Open the engine of `engine.kind`. `spans` get what servers do. Raises ConfigError."""
    return _open_embedded(config) if config.engine.kind == "embedded" else _open_fleet(config, spans or NoSpans())


def _open_embedded(config: TrainConfig) -> OpenedEngine:
    model = config.model
    check_routing(config)
    keep_cache = config.weights.mode == "in_place"
    engine = EmbeddedEngine.load(model, config.engine, seed=config.run.seed, keep_cache=keep_cache)
    return OpenedEngine(engine, engine.expected, engine.respond)


def _open_fleet(config: TrainConfig, spans: Spans) -> OpenedEngine:
    """A fleet, over servers of its own where it starts them."""
    engine, weights = config.engine, config.weights
    check_family(config)
    check_routing(config)
    turns = None
    if config.cluster.colocated:
        turns = ServerTurns(ServersLock(locations.gpu_locks(config.run), config.cluster.ranks))
    launched = _launched(config, turns) if engine.launches else []
    policy = model_shapes(config.model)
    agree_with_servers(config)
    folders = _folders(config)
    settings = FleetSettings(
        engine.attempts,
        engine.wait_s,
        engine.check_s,
        weights.mode,
        weights.drain_s,
        engine.segment_tokens,
        close_s=CLOSE_S,
    )
    fleet = Fleet(
        listed([server.url for server in launched]) if launched else _discovery(config),
        partial(SERVERS[engine.kind], config),
        expected=policy.tensors,
        vocabulary=policy.vocabulary,
        settings=settings,
        folders=folders,
        turns=turns,
        spans=spans,
        routed=engine.return_routed_experts,
        marks=_marks(config),
    )
    keepers = [fleet.keep, folders.keep, *(server.keep for server in launched)]
    if turns is not None:
        keepers.append(turns.keep)
    return OpenedEngine(fleet, policy.tensors, partial(asyncio.sleep, 0), keepers)


def _marks(config: TrainConfig) -> Sequence[int]:
    """The placeholders of images and videos, which servers take for those of images that a request shows."""
    shape = vision_shape(open_config(config.model)) if reads_images(config.engine.kind, config.model) else None
    return () if shape is None else [mark for mark in (shape.image_token, shape.video_token) if mark is not None]


def check_routing(config: TrainConfig) -> None:
    """Raises ConfigError: the experts of tokens are wanted, and the model has none that can be replayed, or an
    episode's do not fit into a message."""
    if not config.engine.return_routed_experts:
        return
    width, actor = routing_shape(open_config(config.model)).width, config.actor
    several = actor.played_by is not None or actor.history == "template"
    longest = actor.max_total_tokens if several else actor.max_tokens
    if width > MAX_ROUTING_BYTES:
        raise ConfigError(
            f"engine.return_routed_experts model.path: the experts of a token take {width} bytes, and at most "
            f"{MAX_ROUTING_BYTES} are taken; set it to false"
        )
    if width * longest > config.network.max_message_mb << 20:
        raise ConfigError(
            f"engine.return_routed_experts network.max_message_mb: the experts of {longest} tokens take "
            f"{width * longest >> 20} MB, {width} bytes a token; raise the second one, or lower actor.max_tokens or "
            "actor.max_total_tokens"
        )


def _discovery(config: TrainConfig) -> Discovery:
    engine = config.engine
    if engine.router is not None:
        return behind_router(engine.router)
    if engine.urls_file is not None:
        return in_file(Path(engine.urls_file))
    return listed(engine.urls)


def _folders(config: TrainConfig) -> Folders:
    """Beside the learner's folders, where there are any: links reach no other file system."""
    name, run = process.worker_name("actor"), locations.run_identity(config.run)
    policy = open_config(config.model)
    learners = weights_dir(config) / "held" if choose_channel(config, CPU)[0] == "disk" else None
    parent = (learners or locations.run_dir(config.run) / "weights").absolute()
    try:
        return Folders(parent, policy.save_pretrained, run, name, config.weights.load_s)
    except OSError as error:
        raise ConfigError(f"servers load weights from {parent}, which this actor cannot write: {error}") from error


def _launched(config: TrainConfig, turns: ServerTurns | None) -> list[LaunchedServer]:
    server = config.engine.server
    logs = locations.run_dir(config.run) / "logs"
    name = process.worker_name("actor")
    count = server_count(server)
    first = server.port or free_ports(count)
    return [
        LaunchedServer(
            f"http://127.0.0.1:{first + index}",
            server_command(config, first + index, index),
            logs / f"{name}-server-{index}.log",
            server.environment,
            server.start_s,
            server.max_failures,
            turns,
        )
        for index in range(count)
    ]
