"""Runs one rank of `asyncrl sft` from its configuration: opens all parts, fine-tunes, and closes the parts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.commands.sft.loop import Imitation
from asyncrl.config import locations
from asyncrl.config.schema import LearnerConfig, TrainConfig
from asyncrl.data.from_config import run_demonstrations
from asyncrl.data.rendered import RenderedDemonstrations, read_rendered
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.export import export, export_adapter
from asyncrl.learner.compiling import compile_passes, keep_compiled
from asyncrl.learner.demonstrations import DemonstrationFeed
from asyncrl.learner.from_config import step_settings
from asyncrl.learner.imitating import IMITATION_TEMPERATURE
from asyncrl.learner.memory import fit_memory, tell_exchange, usable_bytes
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.ranks.activity import END
from asyncrl.learner.ranks.determinism import be_deterministic
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.ranks.stopping import Stopping
from asyncrl.learner.trainer import Trainer
from asyncrl.machine import process
from asyncrl.machine.activity import Activity
from asyncrl.modelling.flops import ForwardFlops
from asyncrl.observe.from_config import open_reports
from asyncrl.observe.metrics import Fanout, Sink
from asyncrl.observe.sinks import metrics_file, remove_steps
from asyncrl.weights.from_config import route_settings
from asyncrl.weights.nccl import keep_to_loopback

logger = logging.getLogger(__name__)


def run_rank(config: TrainConfig, stop: threading.Event, activity: Activity) -> None:
    """Fine-tune as one of several ranks if `run_ranks` started this process, else as the only rank.

    Raises StoppedError: `stop` was set. A later call with the same config resumes from the newest checkpoint.
    """
    learner = config.learner
    if learner.deterministic:
        be_deterministic()
    keep_to_loopback(route_settings(config), actor=False)
    stopping = Stopping()
    with stopping.watched(stop), ExitStack() as stack:
        ranks = stack.enter_context(
            joined(
                learner.replicas,
                learner.rank_timeout_s,
                activity=activity,
                stopping=stopping,
                context_ranks=learner.context_ranks,
                expert_ranks=learner.expert_ranks,
                tensor_ranks=learner.tensor_ranks,
            )
        )
        if config.model.compile or ranks.device.type == "cuda":
            keep_compiled()
        metrics: Sink = Fanout([])
        evaluations: Sink = Fanout([])
        if ranks.rank == 0:
            reports = stack.enter_context(open_reports(config, process.worker_name(f"learner-{ranks.rank}")))
            metrics, evaluations = reports.learner_metrics()
        stack.callback(activity.enter, END)
        fine_tune(config, ranks, metrics, evaluations, stop)


def fine_tune(config: TrainConfig, ranks: Ranks, metrics: Sink, evaluations: Sink, stop: threading.Event) -> None:
    """Load the model, train and export it.

    Raises StoppedError: `stop` was set. Raises DataError: the demonstrations were not rendered. Raises ConfigError or
    CheckpointError: the model or the checkpoints cannot be used.
    """
    learner, folder = config.learner, locations.run_dir(config.run)
    ranks.activity.enter("load")
    shown = read_rendered(run_demonstrations(config).folder(config.data.train))
    held_out = read_rendered(run_demonstrations(config).folder(config.data.eval)) if config.data.eval else None
    longest = max(int(each.lengths.max()) for each in (shown, held_out) if each is not None)
    policy = load_policy(config.model, IMITATION_TEMPERATURE, ranks, longest, seed=config.run.seed)
    algorithm = Algorithm.from_config(config.algorithm, learner.minibatches)
    trainer = Trainer(ranks, algorithm, Trainable(policy, learner.lr, learner, config.model.dtype), None, None, stop)
    trainer.configure(step_settings(config))
    if policy.is_compiled:
        largest = sum(_largest_pass(learner, longest))
        compile_passes(trainer, learner.shared_prefixes is not False, longest, largest, held_out is not None)
    if ranks.device.type == "cuda":
        usable = usable_bytes(ranks.device, learner.memory)
        fit_memory(trainer, _largest_pass(learner, longest), usable, config.model.activations)
    else:
        tell_exchange(trainer)

    def feed(rendered: RenderedDemonstrations) -> DemonstrationFeed:
        return DemonstrationFeed(rendered, config.run.seed, ranks, policy, ForwardFlops.of(policy, policy.model.config))

    checkpoints = Checkpoints(folder / locations.CHECKPOINTS, learner.keep_checkpoints, ranks, stop, learner.keep_best)
    with closing(checkpoints):
        loop = Imitation(
            learner,
            config.run.seed,
            config.model.dtype,
            ranks,
            trainer,
            checkpoints,
            feed(shown),
            None if held_out is None else feed(held_out),
            metrics,
            evaluations,
            stop,
        )
        if ranks.rank == 0:
            # An earlier process may have reported steps and evaluations that this process will repeat.
            for name in ("learner", "evaluation"):
                remove_steps(metrics_file(folder, name), lambda step: step >= loop.progress.step)
            metrics.resumed(loop.progress.step)
        process.freeze_heap()
        loop.train()
    if learner.export:
        ranks.activity.enter("export")
        export(policy, config.model, folder / "model", ranks, stop)
        if config.model.lora.is_used:
            export_adapter(policy, config.model, folder / "adapter", ranks, stop)
    logger.info("fine-tuning is done after %d steps", learner.total_steps)


def _largest_pass(learner: LearnerConfig, longest: int) -> Sequence[int]:
    """The lengths of the demonstrations in the largest possible pass."""
    tokens = max(longest, learner.micro_tokens * learner.pass_ranks)
    return [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
