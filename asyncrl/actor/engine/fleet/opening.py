"""The fleet that the configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl import process
from asyncrl.actor.engine.fleet.discovery import Discovery, behind_router, in_file, listed
from asyncrl.actor.engine.fleet.fleet import Fleet, Rules
from asyncrl.actor.engine.fleet.server import Server
from asyncrl.actor.engine.fleet.signal import Signal
from asyncrl.actor.engine.fleet.switch import Switcher
from asyncrl.actor.engine.fleet.update import Folders
from asyncrl.actor.engine.opened import OpenedEngine
from asyncrl.actor.engine.sglang.launch import LaunchedServer, server_command
from asyncrl.actor.engine.sglang.server import SglangServer
from asyncrl.actor.engine.vllm.server import VllmServer
from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.launch.local import free_ports

SERVERS: Mapping[str, Callable[[TrainConfig, str], Server]] = {"sglang": SglangServer.of, "vllm": VllmServer.of}


@dataclass(frozen=True, slots=True)
class Policy:
    """What is known of the model without its weights."""

    shapes: Mapping[str, tuple[int, ...]]
    vocabulary: int


def policy_of(model: ModelConfig) -> Policy:
    """Parameters are named as in `named_parameters()`, tied ones once."""
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    shapes = {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}
    return Policy(shapes, int(config.vocab_size))


def open_fleet(config: TrainConfig) -> OpenedEngine:
    """The fleet, with the servers of its own where `engine.launch` is set."""
    engine, weights = config.engine, config.weights
    launched = _launched(config) if engine.launch else []
    policy, changed = policy_of(config.model), Signal()
    flush = engine.prefix_cache == "flush"
    fleet = Fleet(
        listed([server.url for server in launched]) if launched else _discovery(config),
        partial(SERVERS[engine.kind], config),
        Switcher(weights.mode, flush, weights.drain_s, changed),
        changed,
        expected=policy.shapes,
        vocabulary=policy.vocabulary,
        rules=Rules(engine.attempts, engine.wait_s, engine.check_s, not flush, engine.segment_tokens),
        folders=_folders(config) if "disk" in weights.transports else None,
    )
    return OpenedEngine(fleet, policy.shapes, [fleet.keep, *(server.keep for server in launched)])


def _discovery(config: TrainConfig) -> Discovery:
    engine = config.engine
    if engine.router is not None:
        return behind_router(engine.router)
    if engine.urls_file is not None:
        return in_file(Path(engine.urls_file))
    return listed(engine.urls)


def _folders(config: TrainConfig) -> Folders:
    model = config.model
    policy = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    return Folders((process.run_dir(config.run) / "weights").absolute(), policy.save_pretrained)


def _launched(config: TrainConfig) -> list[LaunchedServer]:
    server = config.engine.server
    logs = process.run_dir(config.run) / "logs"
    name = process.worker_name("actor")
    first = server.port or free_ports(server.count)
    return [
        LaunchedServer(
            f"http://127.0.0.1:{first + index}",
            server_command(config, first + index, index),
            logs / f"{name}-server-{index}.log",
            server.environment,
            server.start_s,
            server.max_failures,
        )
        for index in range(server.count)
    ]
