"""Opens the embedded engine, or a fleet with the servers that an actor starts. Only this file imports all kinds of
engines and servers."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.schema import EngineConfig, ModelConfig, ServerConfig
from asyncrl.engine.base import Engine
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.fleet.colocation import GpuSharing
from asyncrl.engine.fleet.discovery import Discovery, behind_router, in_file, listed
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.fleet.server import InferenceServer
from asyncrl.engine.fleet.settings import FleetSettings
from asyncrl.engine.sglang.fitting import (
    SHARE,
    GpuMemory,
    cache_tokens,
    fitting_arguments,
    requests_of_server,
    together_arguments,
    token_bytes,
)
from asyncrl.engine.sglang.launch import LaunchedServer, memory_share, server_command, server_count
from asyncrl.engine.sglang.load import load_counters
from asyncrl.engine.sglang.probe import installed_version
from asyncrl.engine.sglang.routes.opening import ServerRouteSettings
from asyncrl.engine.sglang.server import SglangServer
from asyncrl.engine.vllm.server import VllmServer
from asyncrl.errors import ConfigError
from asyncrl.machine.gpu_lock import ServersLock
from asyncrl.machine.gpu_use import gpu_bytes
from asyncrl.machine.ports import free_ports
from asyncrl.modelling.opening import open_config, server_overrides
from asyncrl.modelling.routing import routing_shape
from asyncrl.modelling.shapes import model_shapes
from asyncrl.modelling.vision import sees_images, vision_shape
from asyncrl.observe.spans import Spans
from asyncrl.types import RunIdentity

SWITCH_S = 5e-4
"""Seconds after which a Python thread yields to another one. Python's default is 5 ms. With it, the engine's thread
would wait several times in each pass while episodes compute, and these waits would take longer than the pass."""


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine that is ready.

    - `expected` has the names and shapes of the tensors of an update.
    - `respond` shows that the engine is not stuck. It returns when the embedded engine has finished its current pass,
      and at once for a fleet.
    - All `keepers` must run while the engine is used. A keeper runs until it is cancelled, or until it raises the error
      that ends the actor.
    """

    engine: Engine
    expected: Mapping[str, tuple[int, ...]]
    respond: Callable[[], Awaitable[None]]
    keepers: Sequence[Callable[[], Awaitable[None]]] = ()


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of one server that are not in the section `engine`.

    - `context`: the number of tokens that the server must accept
    - `load_s`: the seconds that the server may take to load a version
    - `routes`: the settings of the routes by which weights reach the server
    """

    context: int
    load_s: float
    routes: ServerRouteSettings


@dataclass(frozen=True, slots=True)
class ServersSettings:
    """The settings of a fleet's servers that are not in the section `engine`.

    - `each`: the settings that each server gets
    - `run` and `name`: the run, and the name of the actor in it
    - `folders`: the directory into which the actor puts weights for its servers to load
    - `logs`: the directory of the servers' logs
    - `episodes`: the number of episodes that the actor runs at once
    - `parallel`: an agent may request several turns of an episode at once
    - `seed`: the seed of the first server that the actor starts; each further server has the next one
    - `gpu_lock`: set if these servers share their GPUs with the learner
    """

    each: ServerSettings
    run: RunIdentity
    name: str
    folders: Path
    logs: Path
    episodes: int
    parallel: bool
    seed: int = 0
    gpu_lock: ServersLock | None = None


def open_embedded(model: ModelConfig, engine: EngineConfig, seed: int, keep_cache: bool) -> OpenedEngine:
    """Load `model` into this process. Raises ConfigError: see `EmbeddedEngine`."""
    opened = EmbeddedEngine.load(model, engine, seed=seed, keep_cache=keep_cache)
    if opened.on_gpu:
        sys.setswitchinterval(SWITCH_S)
    return OpenedEngine(opened, opened.expected, opened.respond)


def open_fleet(
    model: ModelConfig, engine: EngineConfig, fleet: FleetSettings, servers: ServersSettings, spans: Spans
) -> OpenedEngine:
    """Open a fleet, and start its servers if `engine` says so. Raises ConfigError: a setting cannot be used."""
    sharing = GpuSharing(servers.gpu_lock) if servers.gpu_lock is not None else None
    launched = _launched(model, engine, servers, sharing) if engine.launches else []
    policy, shapes, overrides = open_config(model), model_shapes(model), server_overrides(model)
    folders = _folders(policy, servers)
    opened = Fleet(
        listed([server.url for server in launched]) if launched else _discovery(engine),
        server_opener(policy, overrides, engine, servers.each),
        expected=shapes.tensors,
        vocabulary=shapes.vocabulary,
        settings=fleet,
        folders=folders,
        sharing=sharing,
        spans=spans,
        routed=engine.return_routed_experts,
        marks=_marks(policy) if engine.kind == "sglang" else (),
        loads=partial(_loads, launched, engine.server.on_cpu),
        heard=partial(_heard, {server.url: server for server in launched}),
    )
    keepers = [opened.keep, folders.keep, *(server.keep for server in launched)]
    if sharing is not None:
        keepers.append(sharing.keep)
    return OpenedEngine(opened, shapes.tensors, partial(asyncio.sleep, 0), keepers)


def server_opener(
    policy: Any, overrides: Mapping[str, Any], engine: EngineConfig, each: ServerSettings
) -> Callable[[str], InferenceServer]:
    """A function that opens the server of kind `engine.kind` at a url. The server must have been started with
    `overrides` of the `policy`'s Hugging Face configuration."""
    if engine.kind == "vllm":
        return partial(
            VllmServer,
            context=each.context,
            tied=policy.get_text_config().tie_word_embeddings,
            overrides=overrides,
            silence_s=engine.silence_s,
            load_s=each.load_s,
            seeds={},
        )
    launched = engine.server
    return partial(
        SglangServer,
        context=each.context,
        settings=each.routes,
        taken_gpus=range(launched.gpus_of(server_count(launched))) if engine.launches else (),
        silence_s=engine.silence_s,
        load_s=each.load_s,
        overrides=overrides,
        routing=routing_shape(policy) if engine.return_routed_experts else None,
    )


def _marks(policy: Any) -> Sequence[int]:
    """The placeholder tokens of images and videos. A server expects an image for each placeholder in a prompt, even if
    the policy sampled the placeholder."""
    shape = vision_shape(policy) if sees_images(policy) else None
    return () if shape is None else [mark for mark in (shape.image_token, shape.video_token) if mark is not None]


def _discovery(engine: EngineConfig) -> Discovery:
    if engine.router is not None:
        return behind_router(engine.router)
    if engine.urls_file is not None:
        return in_file(Path(engine.urls_file))
    return listed(engine.urls)


def _folders(policy: Any, servers: ServersSettings) -> Folders:
    parent = servers.folders
    try:
        return Folders(parent, policy.save_pretrained, servers.run, servers.name, servers.each.load_s)
    except OSError as error:
        raise ConfigError(f"servers load weights from {parent}, which this actor cannot write: {error}") from error


def _launched(
    model: ModelConfig, engine: EngineConfig, servers: ServersSettings, sharing: GpuSharing | None
) -> list[LaunchedServer]:
    own = engine.server
    count = server_count(own)
    requests = requests_of_server(servers.episodes, count, servers.parallel)
    version = () if own.on_cpu else installed_version(engine.python, own.environment)
    fitting = fitting_arguments(own, requests, version, servers.parallel)
    memory = _gpu_memory(model) if own.together > 1 else None
    first = own.port or free_ports(count)
    return [
        LaunchedServer(
            f"http://127.0.0.1:{first + index}",
            server_command(
                *(engine, model, first + index, index),
                seed=servers.seed,
                shares_gpus=servers.gpu_lock is not None,
                fitting=[*fitting, *_shared_gpu(own, index, memory, requests, servers.each.context)],
            ),
            servers.logs / f"{servers.name}-server-{index}.log",
            own.environment,
            own.start_s,
            own.max_failures,
            sharing,
        )
        for index in range(count)
    ]


def _gpu_memory(model: ModelConfig) -> GpuMemory | None:
    """The memory of the GPU of a server with `model`; `None`: there is no driver or GPU that could say it."""
    import pynvml

    gpu = gpu_bytes(pynvml)
    if gpu is None:
        return None
    itemsize = getattr(torch, model.dtype).itemsize
    weights = sum(math.prod(shape) for shape in model_shapes(model).tensors.values()) * itemsize
    return GpuMemory(gpu, weights, token_bytes(open_config(model).get_text_config(), itemsize))


def _shared_gpu(server: ServerConfig, index: int, memory: GpuMemory | None, requests: int, longest: int) -> list[str]:
    """The arguments of server number `index` if it shares its GPU with other servers. Its `requests` have at most
    `longest` tokens each. Raises ConfigError: see `cache_tokens`."""
    if server.together == 1:
        return []
    tokens = requests * longest
    if memory is not None:
        tokens = cache_tokens(memory, memory_share(server, index) or SHARE, server.together, tokens, longest)
    return together_arguments(server, tokens)


def _heard(servers: Mapping[str, LaunchedServer], url: str, joined: bool) -> None:
    """Tell the `LaunchedServer` at `url` whether its server joined. Servers that this actor did not start have none."""
    if url in servers:
        servers[url].heard(joined)


def _loads(servers: Sequence[LaunchedServer], on_cpu: bool) -> Mapping[str, float]:
    """The hangs of these servers, and the gauges of their load. On the CPU there are no such gauges: servers there have
    no graphs, and their schedulers are busy with the model itself."""
    if not servers:
        return {}
    gauges = {} if on_cpu else load_counters([server.load() for server in servers])
    return {**gauges, "server_hangs": sum(server.hangs for server in servers)}
