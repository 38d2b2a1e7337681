"""One rank of the learner from its configuration: everything it needs is opened here, and closed in the end."""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import ExitStack, closing
from pathlib import Path

import torch
import zmq

from asyncrl.algorithms.compose import Algorithm
from asyncrl.config.schema import TrainConfig
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.export import export
from asyncrl.learner.loop import Learner
from asyncrl.learner.policy import load_policy
from asyncrl.learner.ports import Publisher, Replay
from asyncrl.learner.ranks import Ranks, joined
from asyncrl.learner.trainer import Trainer
from asyncrl.observe.metrics import Fanout, Metrics, open_metrics
from asyncrl.replay.client import ReplayClient
from asyncrl.weights.publisher import Publisher as WeightPublisher

logger = logging.getLogger(__name__)


def run(config: TrainConfig, stop: threading.Event) -> None:
    """Train as `config` says, as the rank that torchrun's environment names, else as the only one.

    Raises StoppedError: `stop` was set. A later call with the same config resumes from the newest checkpoint.
    """
    torch.set_num_threads(config.cluster.learner_threads)
    network = config.network
    with ExitStack() as stack:
        ranks = stack.enter_context(joined())
        context = stack.enter_context(zmq.Context())
        endpoint = f"tcp://{network.host}:{network.replay_port}"
        worker = f"learner-{ranks.rank}"
        replay = stack.enter_context(closing(ReplayClient(endpoint, worker, uuid.uuid4().hex, stop, context=context)))
        publisher: WeightPublisher | None = None
        metrics: Metrics = Fanout([])
        if ranks.rank == 0:
            publisher = WeightPublisher(network.host, network.weights_port, context, insecure=network.insecure)
            stack.callback(publisher.close)
            metrics = stack.enter_context(closing(open_metrics(config.observe, run_folder(config), "learner")))
        train(config, ranks, replay, publisher, metrics, stop)


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
    temperature = config.actor.temperature
    policy = load_policy(config.model, temperature, ranks)
    reference = load_policy(config.model, temperature, ranks) if algorithm.needs_reference else None
    trainer = Trainer(config.learner, ranks, algorithm, policy, reference, stop)
    folder = run_folder(config)
    checkpoints = Checkpoints(folder / "checkpoints", config.learner.keep_checkpoints, ranks)
    Learner(config, ranks, trainer, checkpoints, replay, publisher, metrics, stop).train()
    if config.learner.export:
        export(policy, config.model, folder / "model", ranks)
    logger.info("the learner is done after %d steps", config.learner.steps)


def run_folder(config: TrainConfig) -> Path:
    """Where everything of this run lies."""
    return Path(config.run.dir) / config.run.name
