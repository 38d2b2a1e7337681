"""One rank of the learner from its configuration: everything it needs is opened here, and closed in the end."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from asyncrl.algorithms.compose import Algorithm
from asyncrl.config import locations
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.critic import load_critic
from asyncrl.learner.export import described, export
from asyncrl.learner.failures import StepFailures
from asyncrl.learner.loop import Learner
from asyncrl.learner.optimised import Optimised
from asyncrl.learner.policy import Policy, load_policy
from asyncrl.learner.ports import Publisher, Replay
from asyncrl.learner.ranks import Ranks, joined
from asyncrl.learner.recorded import RecordedReplay
from asyncrl.learner.trainer import Trainer
from asyncrl.machine import process
from asyncrl.modelling.shapes import model_shapes
from asyncrl.network.keys import client_keys, server_keys
from asyncrl.observe.metrics import Fanout, Metrics
from asyncrl.observe.sinks import open_metrics
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.shards import ShardedReplay
from asyncrl.weights.broadcast import Broadcaster
from asyncrl.weights.channels.opening import weights_dir
from asyncrl.weights.folders import FolderWriter
from asyncrl.weights.nccl import agree_with_servers, keep_to_loopback
from asyncrl.weights.publisher import Publisher as WeightPublisher
from asyncrl.weights.push import Push

logger = logging.getLogger(__name__)


def run(config: TrainConfig, stop: threading.Event) -> None:
    """Train as `config` says, as the rank that this process was started as, else as the only one. With `replay.source`
    the recorded plans of another run are trained again, and nothing is published or evaluated.

    Raises StoppedError: `stop` was set. A later call with the same config resumes from the newest checkpoint.
    """
    recorded = config.replay.source is not None
    if recorded:
        config = replace(config, learner=replace(config.learner, eval_every=0))
    if config.weights.channel == "distributed":
        agree_with_servers(config)
    keep_to_loopback(config, actor=False)
    with ExitStack() as stack:
        ranks = stack.enter_context(joined())
        context = stack.enter_context(zmq.Context())
        replay = stack.enter_context(closing(_replay(config, ranks, context, stop)))
        publisher: Push | None = None
        metrics: Metrics = Fanout([])
        if ranks.rank == 0:
            metrics = stack.enter_context(
                closing(open_metrics(config.observe, locations.run_dir(config.run), "learner"))
            )
            if not recorded:
                publisher = stack.enter_context(closing(_push(config, ranks, context)))
        train(config, ranks, replay, publisher, metrics, stop)


def _implicit(config: TrainConfig, ranks: Ranks) -> Optimised[Policy] | None:
    """The implicit process model, where it is trained here: it begins as the policy begins, unless told otherwise."""
    if not config.implicit.train:
        return None
    model = replace(config.model, path=config.implicit.path or config.model.path)
    return Optimised(
        load_policy(model, config.actor.temperature, ranks, config.actor.max_tokens), config.implicit.lr, config.learner
    )


def _replay(
    config: TrainConfig, ranks: Ranks, context: zmq.Context[Any], stop: threading.Event
) -> RecordedReplay | ShardedReplay:
    if config.replay.source is not None:
        source = Path(config.replay.source)
        if source.resolve().is_relative_to(locations.run_dir(config.run).resolve()):
            raise ConfigError(f"replay.source={source} is this run's own store; give the new training another run.name")
        return RecordedReplay(source, config.learner.steps)
    worker, life = process.worker_name(f"learner-{ranks.rank}"), process.incarnation()
    endpoints = locations.replay_endpoints(config.network, config.replay.shards)
    keys, run = client_keys(config.network), locations.run_identity(config.run, make=True)
    return ShardedReplay(
        [ReplayClient(each, worker, life, stop, context=context, keys=keys, run=run) for each in endpoints]
    )


def _push(config: TrainConfig, ranks: Ranks, context: zmq.Context[Any]) -> Push:
    network, weights, run = config.network, config.weights, locations.run_identity(config.run, make=True)
    expected, ways = model_shapes(config.model).tensors, (weights.channel, weights.fallback)
    with ExitStack() as stack:
        publisher = WeightPublisher(
            network.host,
            network.weights_port,
            context,
            keys=server_keys(network),
            insecure=network.insecure,
            run=run,
            history=weights.history,
        )
        stack.callback(publisher.close)
        broadcaster = folders = None
        if "distributed" in ways:
            broadcaster = Broadcaster(publisher, network.host, ranks.device, weights.timeout_s)
        if "disk" in ways:
            folders = FolderWriter(weights_dir(config), described(config.model), run)
        stack.pop_all()
    return Push(expected, publisher, broadcaster, folders)


def train(
    config: TrainConfig,
    ranks: Ranks,
    replay: Replay,
    publisher: Publisher | None,
    metrics: Metrics,
    stop: threading.Event,
) -> None:
    """Load, train, and export. Raises StoppedError, and ConfigError or CheckpointError where something does not fit."""
    algorithm = Algorithm.from_config(config.algorithm)
    temperature, length, learner = config.actor.temperature, config.actor.max_tokens, config.learner
    policy = load_policy(config.model, temperature, ranks, length)
    implicit = _implicit(config, ranks)
    wants_reference = algorithm.needs_reference or implicit is not None
    reference = load_policy(config.model, temperature, ranks, length) if wants_reference else None
    critic = load_critic(config.critic, config.model, ranks, length) if algorithm.needs_critic else None
    trainer = Trainer(
        ranks,
        algorithm,
        Optimised(policy, learner.lr, learner),
        None if critic is None else Optimised(critic, config.critic.lr, learner),
        reference,
        stop,
        implicit,
    )
    folder = locations.run_dir(config.run)
    checkpoints = Checkpoints(folder / "checkpoints", learner.keep_checkpoints, ranks, stop)
    failures = StepFailures(folder / f"learner-{ranks.rank}-failures.json")
    Learner(config, ranks, trainer, checkpoints, replay, publisher, metrics, stop, failures).train()
    if learner.export:
        export(policy, config.model, folder / "model", ranks, stop)
    logger.info("the learner is done after %d steps", learner.steps)
