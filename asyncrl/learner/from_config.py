"""Opens the connections of one rank, and makes the settings of the other files from the configuration."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import zmq

from asyncrl.algorithms.from_config import label_needs
from asyncrl.config import locations
from asyncrl.config.changes import ConfigHistory, recorded, values_of
from asyncrl.config.schema import TrainConfig
from asyncrl.data.from_config import run_demonstrations
from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.batch.from_config import keep_settings, open_batches
from asyncrl.learner.checkpoint.export import folder_writer
from asyncrl.learner.compiling import keep_compiled
from asyncrl.learner.model.canary import CanarySettings
from asyncrl.learner.profiling import ProfileSettings
from asyncrl.learner.ranks.activity import END
from asyncrl.learner.ranks.determinism import be_deterministic
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.launcher import Membership
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.ranks.stopping import PATIENCE_S, Stopping
from asyncrl.learner.run import Connections, train_rank
from asyncrl.learner.settings import ModelSettings, RunSettings, SettingsHistory, StepSettings
from asyncrl.machine import process
from asyncrl.machine.activity import Activity
from asyncrl.machine.ports import listening
from asyncrl.modelling.shapes import model_shapes
from asyncrl.network.keys import client_keys, server_keys
from asyncrl.observe.from_config import open_reports
from asyncrl.observe.metrics import Fanout, Sink
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.weights.broadcast import Broadcaster
from asyncrl.weights.folders import FolderWriter
from asyncrl.weights.from_config import route_settings
from asyncrl.weights.group import BACKENDS, gpu_of
from asyncrl.weights.nccl import agree_with_servers, keep_to_loopback
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.routes import RouteSettings, routes_to_engines
from asyncrl.weights.server import WeightServer
from asyncrl.weights.transfers import Broadcasts

logger = logging.getLogger(__name__)


def run(config: TrainConfig, stop: threading.Event, activity: Activity, patience_s: float = PATIENCE_S) -> None:
    """Train as `config` says. This process is one rank of several if `run_ranks` started it, else the only rank.
    `activity` shows what this process does. The process ends soon after `stop` is set: if its main thread has not ended
    it within `patience_s` seconds, a helper thread does.

    With `replay.source` it trains the recorded plans of another run again, and publishes and evaluates nothing. Raises
    StoppedError: `stop` was set. A later call with the same config resumes from the newest checkpoint.
    """
    repeats = config.replay.source is not None
    if repeats:
        config = replace(config, learner=replace(config.learner, eval_every=0))
    _prepare_process(config.learner.deterministic, route_settings(config))
    learner, stopping = config.learner, Stopping()
    with stopping.watched(stop, patience_s), ExitStack() as stack:
        ranks = stack.enter_context(
            joined(
                learner.replicas,
                learner.rank_timeout_s,
                client_keys(config.network.keys),
                activity,
                stopping,
                context_ranks=learner.context_ranks,
                expert_ranks=learner.expert_ranks,
                tensor_ranks=learner.tensor_ranks,
            )
        )
        if config.model.compile or ranks.device.type == "cuda":
            keep_compiled()
        context = stack.enter_context(zmq.Context())
        reports = stack.enter_context(open_reports(config, process.worker_name(f"learner-{ranks.rank}")))
        spans = reports.spans
        replay = stack.enter_context(closing(open_batches(config, ranks.rank, context, stop, spans)))
        publisher: Publisher | None = None
        metrics: Sink = Fanout([])
        evaluations: Sink = Fanout([])
        if ranks.rank == 0:
            metrics, evaluations = reports.learner_metrics()
            if not repeats:
                publisher = stack.enter_context(closing(open_publisher(config, ranks, context, stop, spans)))
        stack.callback(activity.enter, END)
        train(config, ranks, replay, publisher, metrics, evaluations, stop, spans)
        if ranks.rank == 0:
            with activity.waiting():
                replay.finished()


def _prepare_process(deterministic: bool, routes: RouteSettings) -> None:
    """Set the environment of this process before it uses a GPU or the network."""
    if deterministic:
        be_deterministic()
    if routes.to_engines == "distributed":
        agree_with_servers(routes)
    member = Membership.of_this_process()
    if member is not None and member.meeting.interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={member.meeting.interface}")
    else:
        keep_to_loopback(routes, actor=False)


def train(
    config: TrainConfig,
    ranks: Ranks,
    replay: BatchSource,
    publisher: Publisher | None,
    metrics: Sink,
    evaluations: Sink,
    stop: threading.Event,
    spans: Spans | None = None,
) -> None:
    """Agree with the replay on the changes of the configuration, and train.

    Raises the errors of `train_rank`; ConfigError: a setting has changed that must stay the same for the whole run;
    StoreError: a stored run cannot be trained again by this algorithm.
    """
    changes = ranks.together(lambda: replay.configure(recorded(values_of(config)), int(time.time())))
    if ranks.rank == 0:
        locations.record_config(config)
    by_step = ConfigHistory(config, changes).by_step()
    history = SettingsHistory({step: step_settings(each) for step, each in by_step.items()}, changes)
    needs = {step: label_needs(each.algorithm) for step, each in history.starts.items()}
    ranks.together(lambda: replay.require(needs))
    connections = Connections(ranks, replay, publisher, metrics, evaluations, stop, spans or NoSpans())
    train_rank(run_settings(config), history, connections)


def step_settings(config: TrainConfig) -> StepSettings:
    """Return the settings that a step is trained with."""
    critic = config.critic
    return StepSettings(
        config.learner, config.algorithm, critic.lr, critic.weight, critic.warmup_steps, config.implicit.lr
    )


def run_settings(config: TrainConfig) -> RunSettings:
    """Return the settings of a whole run. Raises DataError: the run's demonstrations were not rendered."""
    actor, observe, folder = config.actor, config.observe, locations.run_dir(config.run)
    shown = config.algorithm.sft.path
    return RunSettings(
        folder=folder,
        learner=config.learner,
        models=ModelSettings(
            config.model,
            config.critic,
            config.implicit,
            config.run.seed,
            actor.temperature,
            actor.max_tokens,
            max(actor.max_tokens, run_demonstrations(config).max_tokens if shown else 0),
        ),
        algorithm=config.algorithm,
        seed=config.run.seed,
        max_lag=config.replay.max_lag,
        bucket_bytes=config.weights.bucket_mb << 20,
        # All sequences of an episode must fit into one pass.
        largest_episode=actor.largest_episode,
        canary=CanarySettings(config.run.seed, actor.max_tokens, config.model.dtype) if config.weights.canary else None,
        keep=keep_settings(observe, config.run.seed),
        profile=ProfileSettings(observe.profile_steps, observe.memory_steps, folder / "profile"),
        gpu_locks=locations.gpu_locks(config.run) if config.cluster.colocated else None,
        demonstrations=run_demonstrations(config).read(shown) if shown else None,
        uploads_model="model" in observe.upload,
    )


def open_publisher(
    config: TrainConfig, ranks: Ranks, context: zmq.Context[Any], stop: threading.Event, spans: Spans | None = None
) -> Publisher:
    """Open the publisher of the run's weights. Raises ConfigError: the learner's port is taken; StoppedError: `stop`
    was set."""
    network, weights, run = config.network, config.weights, locations.run_identity(config.run, make=True)
    expected, device = model_shapes(config.model).tensors, ranks.device
    routes = route_settings(config)
    chosen = routes_to_engines(routes, device)
    route = chosen.routes[0].name
    logger.info("weights go to engines by %s, because %s", route, chosen.why)
    broadcasts = Broadcasts(BACKENDS[device.type], gpu_of(device)) if route == "distributed" else None
    with ExitStack() as stack:
        open_server = partial(
            WeightServer,
            network.learner_address,
            network.weights_port,
            context,
            keys=server_keys(network.keys),
            insecure=network.insecure,
            run=run,
            history=weights.history,
            broadcasts=broadcasts,
            spans=spans,
        )
        server = listening(open_server, f"network.weights_port={network.weights_port}", stop)
        stack.callback(server.close)
        broadcaster = folders = None
        if broadcasts is not None:
            broadcaster = Broadcaster(server, network.learner_address, device, weights.timeout_s)
        if route == "disk":
            folders = FolderWriter(routes.folder, folder_writer(config.model), run)
        stack.pop_all()
    return Publisher(expected, server, broadcaster, folders)
