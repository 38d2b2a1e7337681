"""One rank of the learner from its configuration: this opens everything that it needs, and closes it in the end."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.from_config import label_needs
from asyncrl.config import locations
from asyncrl.config.changes import ConfigHistory, recorded, values_of
from asyncrl.config.schema import TrainConfig
from asyncrl.data.from_config import run_demonstrations
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.batches import BatchSource, open_batches
from asyncrl.learner.batch.keeping import open_keeper
from asyncrl.learner.checkpoint.checkpoint import Checkpoints, Progress
from asyncrl.learner.checkpoint.critic_export import export_critic, shared_critic
from asyncrl.learner.checkpoint.export import export, export_adapter, folder_writer, save_code
from asyncrl.learner.colocation import Turns
from asyncrl.learner.compiling import compile_passes
from asyncrl.learner.demonstrations import DemonstrationFeed
from asyncrl.learner.loop import Learner
from asyncrl.learner.memory import fit_memory, tell_exchange, usable_bytes
from asyncrl.learner.model.critic import load_critic
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import Policy, load_policy, reference_of
from asyncrl.learner.model.sharding import compiles
from asyncrl.learner.ranks.activity import END
from asyncrl.learner.ranks.determinism import be_deterministic
from asyncrl.learner.ranks.failures import StepFailures
from asyncrl.learner.ranks.launcher import Membership
from asyncrl.learner.ranks.leaving import Leaving
from asyncrl.learner.ranks.ranks import Ranks, joined
from asyncrl.learner.step_metrics import Phases
from asyncrl.learner.trainer import Trainer
from asyncrl.machine import process
from asyncrl.machine.activity import Activity
from asyncrl.machine.gpu_lock import LearnerLock
from asyncrl.machine.ports import listening
from asyncrl.modelling.flops import ForwardFlops
from asyncrl.modelling.opening import beside
from asyncrl.modelling.shapes import model_shapes
from asyncrl.network.keys import client_keys, server_keys
from asyncrl.observe.kept.reading import EVALUATED_FOLDER
from asyncrl.observe.kept.writing import remove_kept
from asyncrl.observe.metrics import Fanout, Sink
from asyncrl.observe.reports import open_reports
from asyncrl.observe.sinks import metrics_file, remove_steps
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.weights.broadcast import Broadcaster
from asyncrl.weights.folders import FolderWriter
from asyncrl.weights.from_config import route_settings
from asyncrl.weights.group import BACKENDS, gpu_of
from asyncrl.weights.nccl import agree_with_servers, keep_to_loopback
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.routes import routes_to_engines
from asyncrl.weights.server import WeightServer
from asyncrl.weights.transfers import Broadcasts

logger = logging.getLogger(__name__)


def run(config: TrainConfig, stop: threading.Event, activity: Activity) -> None:
    """Train as `config` says: as one rank if `run_ranks` started this process, else as the only one. With
    `replay.source` it trains the recorded plans of another run again, and publishes and evaluates nothing. `activity`
    is that of this process.

    Raises StoppedError: `stop` was set. A later call with the same config resumes from the newest checkpoint.
    """
    recorded = config.replay.source is not None
    if recorded:
        config = replace(config, learner=replace(config.learner, eval_every=0))
    if config.learner.deterministic:
        be_deterministic()
    if config.weights.channel == "distributed":
        agree_with_servers(route_settings(config))
    member, learner = Membership.of_this_process(), config.learner
    if member is not None and member.meeting.interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={member.meeting.interface}")
    else:
        keep_to_loopback(route_settings(config), actor=False)
    leaving = Leaving()
    with leaving.watched(stop), ExitStack() as stack:
        keys = client_keys(config.network.keys)
        ranks = stack.enter_context(
            joined(
                learner.replicas,
                learner.rank_timeout_s,
                keys,
                activity,
                leaving,
                context_ranks=learner.context_ranks,
                expert_ranks=learner.expert_ranks,
                tensor_ranks=learner.tensor_ranks,
            )
        )
        context = stack.enter_context(zmq.Context())
        reports = stack.enter_context(open_reports(config, process.worker_name(f"learner-{ranks.rank}")))
        spans = reports.spans
        replay = stack.enter_context(closing(open_batches(config, ranks.rank, context, stop, spans)))
        publisher: Publisher | None = None
        metrics: Sink = Fanout([])
        evaluations: Sink = Fanout([])
        if ranks.rank == 0:
            metrics, evaluations = reports.learner_metrics()
            if not recorded:
                publisher = stack.enter_context(closing(open_publisher(config, ranks, context, stop, spans)))
        stack.callback(activity.enter, END)
        train(config, ranks, replay, publisher, metrics, evaluations, stop, spans)
        if ranks.rank == 0:
            with activity.waiting():
                replay.finished()


def _implicit(config: TrainConfig, ranks: Ranks) -> Trainable[Policy] | None:
    """The implicit process model, if the learner trains one. It starts as the policy does unless it has a path."""
    if not config.implicit.train:
        return None
    own = config.implicit
    model = replace(beside(config.model, own.path, own.freeze), lora=own.lora)
    length, seed = config.actor.max_tokens, config.run.seed
    policy = load_policy(model, config.actor.temperature, ranks, length, "implicit", seed=seed)
    return Trainable(policy, own.lr, config.learner, config.model.dtype)


def _check_sight(policy: Policy, implicit: Trainable[Policy] | None, has_critic: bool) -> None:
    """Raises ConfigError: the policy reads images, and a model beside it would see none, or other ones."""
    if policy.vision is None:
        return
    if has_critic:
        raise ConfigError(
            "model.path reads images, and a critic of its own would see none: use critic.shared, or an advantage "
            "without a critic"
        )
    if implicit is not None and implicit.module.vision != policy.vision:
        raise ConfigError(
            "model.path reads images, and the model of implicit.path reads none, or cuts them otherwise: leave "
            "implicit.path out, or name a model of the same family"
        )


def open_publisher(
    config: TrainConfig, ranks: Ranks, context: zmq.Context[Any], stop: threading.Event, spans: Spans | None = None
) -> Publisher:
    """What publishes the weights of the run. Raises ConfigError: the learner's port is taken; StoppedError."""
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
    """Load, train, and export. Raises StoppedError; ConfigError and CheckpointError: the run cannot resume with this
    configuration, or the models or the checkpoints cannot be used; StoreError: a stored run cannot be trained again by
    this algorithm."""
    changes = ranks.together(lambda: replay.configure(recorded(values_of(config)), int(time.time())))
    if ranks.rank == 0:
        locations.record_config(config)
    history = ConfigHistory(config, changes)
    needs = {step: label_needs(each.algorithm) for step, each in history.by_step().items()}
    ranks.together(lambda: replay.require(needs))
    lock = LearnerLock(locations.gpu_locks(config.run), ranks.rank) if config.cluster.colocated else None
    with closing(Turns(ranks, lock, stop)) as turns:
        turns.begin(Phases(ranks.activity.enter))
        _train(config, history, ranks, replay, publisher, metrics, evaluations, stop, turns, spans or NoSpans())


def _train(
    config: TrainConfig,
    history: ConfigHistory,
    ranks: Ranks,
    replay: BatchSource,
    publisher: Publisher | None,
    metrics: Sink,
    evaluations: Sink,
    stop: threading.Event,
    turns: Turns,
    spans: Spans,
) -> None:
    algorithm = Algorithm.from_config(config.algorithm, config.learner.minibatches)
    temperature, length, learner = config.actor.temperature, _longest(config), config.learner
    replays = any(each.learner.router_replay for each in history.configs())
    seed, shares = config.run.seed, algorithm.needs_critic and config.critic.shared
    policy = load_policy(
        config.model, temperature, ranks, length, replays_routing=replays, seed=seed, with_values=shares
    )
    implicit = _implicit(config, ranks)
    algorithms = (Algorithm.from_config(each.algorithm, each.learner.minibatches) for each in history.configs())
    wants_reference = implicit is not None or any(each.needs_reference for each in algorithms)
    reference = reference_of(policy, config, ranks) if wants_reference else None
    has_critic = algorithm.needs_critic and not shares
    _check_sight(policy, implicit, has_critic)
    critic = load_critic(config.critic, config.model, ranks, length, seed) if has_critic else None
    trainer = Trainer(
        ranks,
        algorithm,
        Trainable(policy, learner.lr, learner, config.model.dtype),
        None if critic is None else Trainable(critic, config.critic.lr, learner, config.model.dtype),
        reference,
        stop,
        implicit,
    )
    if compiles(config.model, ranks.device):
        share_prefixes = any(each.learner.shared_prefixes is not False for each in history.configs())
        # Experts are balanced by constants from passes of their own.
        balances = any(each.algorithm.balance_weight != 0 for each in history.configs())
        compile_passes(trainer, share_prefixes, length, sum(_largest_pass(history)), balances)
    if ranks.device.type == "cuda":
        usable = usable_bytes(ranks.device, learner.memory)
        fit_memory(trainer, _largest_pass(history), usable, config.model.activations)
    else:
        tell_exchange(trainer)
    folder = locations.run_dir(config.run)
    checkpoints = Checkpoints(folder / "checkpoints", learner.keep_checkpoints, ranks, stop, learner.keep_best)
    if ranks.rank == 0:
        save_code(policy.model, folder / locations.CHECKPOINTS / "code")
    failures = StepFailures(folder / f"learner-{ranks.rank}-failures.json")
    with closing(checkpoints), closing(open_keeper(config, ranks, metrics)) as keeper:
        loop = Learner(
            config,
            history,
            ranks,
            trainer,
            checkpoints,
            replay,
            publisher,
            metrics,
            evaluations,
            stop,
            failures,
            turns,
            keeper,
            spans,
            open_demonstrations(config, ranks, policy),
        )
        if ranks.rank == 0:
            remove_repeated(folder, loop.progress, loop.evaluates)
            metrics.resumed(loop.progress.step)
        process.freeze_heap()
        loop.train()
    if learner.export:
        turns.begin(Phases(ranks.activity.enter))
        export(policy, config.model, folder / "model", ranks, stop)
        if config.model.lora.is_used:
            export_adapter(policy, config.model, folder / "adapter", ranks, stop)
        values = shared_critic(policy) if shares else critic
        if values is not None:
            export_critic(values, config.critic, config.model, folder / "critic", ranks, stop)
        if "model" in config.observe.upload:
            metrics.model(learner.total_steps, folder / "model")
    logger.info("the learner is done after %d steps", learner.total_steps)


def _longest(config: TrainConfig) -> int:
    """The tokens of the longest sequence that is trained."""
    return max(config.actor.max_tokens, run_demonstrations(config).max_tokens if config.algorithm.sft.path else 0)


def open_demonstrations(config: TrainConfig, ranks: Ranks, policy: Policy) -> DemonstrationFeed | None:
    """The demonstrations that `config` mixes into the steps, if any. Raises DataError: no start has rendered them."""
    if not config.algorithm.sft.path:
        return None
    rendered = run_demonstrations(config).read(config.algorithm.sft.path)
    flops = ForwardFlops.of(policy, policy.model.config)
    return DemonstrationFeed(rendered, config.run.seed, ranks, policy, flops)


def _largest_pass(history: ConfigHistory) -> list[int]:
    """The lengths of the longest sequences that are trained in one pass."""
    config = history.at(0)
    longest = _longest(config)
    together = config.learner.pass_ranks
    tokens = max(longest, *(each.learner.micro_tokens * together for each in history.configs()))
    if config.actor.played_by is not None or config.actor.history == "template":
        # The sequences of an episode are in one pass.
        tokens = max(tokens, config.actor.max_total_tokens)
    return [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])


def remove_repeated(run_dir: Path, done: Progress, evaluates: Callable[[int], bool]) -> None:
    """Remove the metrics and the kept episodes of the steps and evaluations that an earlier learner reported, and that
    this one repeats. The last evaluation of a run that goes on stays, unless one is due after that step anyway."""

    def is_trained_again(step: int) -> bool:
        return step >= done.step

    def is_evaluated_again(step: int) -> bool:
        return step > done.step or step in done.evaluations or (step == done.step and evaluates(step))

    remove_kept(run_dir, is_trained_again)
    remove_kept(run_dir, is_evaluated_again, EVALUATED_FOLDER)
    remove_steps(metrics_file(run_dir, "learner"), is_trained_again)
    remove_steps(metrics_file(run_dir, "evaluation"), is_evaluated_again)
