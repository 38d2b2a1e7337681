"""Runs one rank of the learner: loads the models, trains them, and exports them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from asyncrl.config import locations
from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.batch.fetching import BatchFetcher
from asyncrl.learner.batch.keeping import EpisodeKeeper, open_keeper
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.critic_export import export_critic, shared_critic
from asyncrl.learner.checkpoint.export import export, export_adapter, save_code
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.checkpointing import Checkpointing, resume
from asyncrl.learner.colocation import SharedGpus
from asyncrl.learner.demonstrations import DemonstrationFeed
from asyncrl.learner.evaluating import Evaluating
from asyncrl.learner.loop import Learner
from asyncrl.learner.models import fit_passes, load_trainer
from asyncrl.learner.plans import Plans
from asyncrl.learner.profiling import profiled
from asyncrl.learner.publishing import Publishing, Versions
from asyncrl.learner.ranks.failures import StepFailures
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.reporting import StepReports
from asyncrl.learner.settings import RunSettings, SettingsHistory
from asyncrl.learner.step_metrics import Phases
from asyncrl.learner.stop_request import StopRequest
from asyncrl.learner.stopping import StopCheckpoint
from asyncrl.learner.trainer import Trainer
from asyncrl.machine import process
from asyncrl.machine.files import when_there_is_room, write_whole
from asyncrl.machine.gpu_lock import LearnerLock
from asyncrl.modelling.flops import ForwardFlops, measured_peak
from asyncrl.modelling.images import TAKEN, ImageReader
from asyncrl.observe.kept.format import EVALUATED_FOLDER
from asyncrl.observe.kept.writing import remove_kept
from asyncrl.observe.metrics import Sink
from asyncrl.observe.sinks import metrics_file, remove_steps
from asyncrl.observe.spans import Spans
from asyncrl.weights.manifest import DTYPES
from asyncrl.weights.publisher import Publisher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Connections:
    """The connections of one rank to the rest of the run. Only rank 0 has a `publisher`. The sinks of metrics of the
    other ranks write nothing."""

    ranks: Ranks
    replay: BatchSource
    publisher: Publisher | None
    metrics: Sink
    evaluations: Sink
    stop: threading.Event
    spans: Spans


def train_rank(settings: RunSettings, history: SettingsHistory, connections: Connections) -> None:
    """Load the models, train and export them.

    Raises StoppedError: this process was asked to stop; ConfigError and CheckpointError: the run cannot resume with
    these settings, or the models or the checkpoints cannot be used.
    """
    ranks, stop = connections.ranks, connections.stop
    lock = None if settings.gpu_locks is None else LearnerLock(settings.gpu_locks, ranks.rank)
    with closing(SharedGpus(ranks, lock, stop)) as gpus:
        gpus.acquire(Phases(ranks.activity.enter))
        trainer = load_trainer(settings, history, ranks, stop)
        with ExitStack() as stack:
            learner = _Parts(settings, history, connections, trainer, gpus, stack).learner()
            if ranks.rank == 0:
                (settings.folder / locations.SOLVED_FILE).unlink(missing_ok=True)
                remove_repeated(settings.folder, learner.progress, learner.evaluating.is_due)
                connections.metrics.resumed(learner.progress.step)
            learner.train()
        if settings.learner.export:
            gpus.acquire(Phases(ranks.activity.enter))
            _export(settings, trainer, connections, learner.progress.step)
    if learner.plans.solved:
        logger.info("the learner ends after %d steps: %s", learner.progress.step, learner.plans.solved)
        if ranks.rank == 0:
            file = settings.folder / locations.SOLVED_FILE
            when_there_is_room(lambda: write_whole(file, learner.plans.solved), stop, str(file))
    else:
        logger.info("the learner is done after %d steps", learner.progress.step)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Makes the parts of the loop. `stack` closes them."""

    settings: RunSettings
    history: SettingsHistory
    connections: Connections
    trainer: Trainer
    gpus: SharedGpus
    stack: ExitStack

    def learner(self) -> Learner:
        """Make all parts, and resume from the newest checkpoint. Raises CheckpointError: this checkpoint cannot be
        used."""
        settings, ranks = self.settings, self.connections.ranks
        learner, replay = settings.learner, self.connections.replay
        policy = self.trainer.policy.module
        flops = ForwardFlops.of(policy, policy.model.config)
        checkpoints, keeper = self._checkpoints(), self._keeper()
        demonstrations = None
        if settings.demonstrations is not None:
            demonstrations = DemonstrationFeed(settings.demonstrations, settings.seed, ranks, policy, flops)
        progress = resume(checkpoints, self.trainer, self.history, demonstrations)
        versions = Versions(learner.publish_every, learner.total_steps)
        stop = StopRequest(ranks, self.connections.stop)
        checkpointing = Checkpointing(
            checkpoints, ranks, self.trainer, progress, replay, stop, learner.checkpoint_every, learner.total_steps
        )
        publishing = self._publishing(stop)
        reports = self._reports(progress, publishing, keeper, demonstrations, flops)
        return Learner(
            total_steps=learner.total_steps,
            seed=settings.seed,
            history=self.history,
            versions=versions,
            ranks=ranks,
            stop=stop,
            trainer=self.trainer,
            prepare=self._prepare,
            progress=progress,
            plans=Plans(replay, ranks, stop),
            fetcher=self._fetcher(keeper, flops),
            keeper=keeper,
            demonstrations=demonstrations,
            failures=StepFailures(settings.folder / f"learner-{ranks.rank}-failures.json"),
            gpus=self.gpus,
            publishing=publishing,
            evaluating=self._evaluating(versions, checkpoints, keeper, progress, stop),
            checkpointing=checkpointing,
            reports=reports,
            at_stop=StopCheckpoint(ranks, self.gpus, checkpointing, reports.report, learner.publish_every),
            profiled=partial(profiled, settings=settings.profile, rank=ranks.rank),
            spans=self.connections.spans,
        )

    def _prepare(self) -> None:
        fit_passes(self.trainer, self.settings, self.history)
        # The compiler leaves many objects, which garbage collections would search again and again.
        process.freeze_heap()

    def _checkpoints(self) -> Checkpoints:
        learner, ranks = self.settings.learner, self.connections.ranks
        folder = self.settings.folder / locations.CHECKPOINTS
        checkpoints = Checkpoints(folder, learner.keep_checkpoints, ranks, self.connections.stop, learner.keep_best)
        if ranks.rank == 0:
            save_code(self.trainer.policy.module.model, folder / "code")
        return self.stack.enter_context(closing(checkpoints))

    def _keeper(self) -> EpisodeKeeper:
        settings, connections = self.settings, self.connections
        keeper = open_keeper(
            settings.keep, settings.folder, settings.models.policy, connections.ranks, connections.metrics
        )
        return self.stack.enter_context(closing(keeper))

    def _fetcher(self, keeper: EpisodeKeeper, flops: ForwardFlops) -> BatchFetcher:
        policy, connections = self.trainer.policy.module, self.connections
        return BatchFetcher(
            lambda step: self.history.at(step).batch,
            self.settings.learner.total_steps,
            connections.ranks,
            policy,
            flops,
            connections.replay,
            keeper,
            None if policy.vision is None else ImageReader.of(self.settings.models.policy, TAKEN),
            connections.spans,
        )

    def _publishing(self, stop: StopRequest) -> Publishing:
        settings, connections = self.settings, self.connections
        return Publishing(
            self.trainer.policy.module,
            connections.ranks,
            connections.replay,
            connections.publisher,
            DTYPES[settings.models.policy.dtype],
            settings.bucket_bytes,
            settings.canary,
            stop,
        )

    def _evaluating(
        self,
        versions: Versions,
        checkpoints: Checkpoints,
        keeper: EpisodeKeeper,
        progress: Progress,
        stop: StopRequest,
    ) -> Evaluating:
        learner, connections = self.settings.learner, self.connections
        return Evaluating(
            learner.eval_every,
            versions,
            connections.replay,
            checkpoints,
            keeper,
            connections.evaluations,
            progress,
            stop,
            # Only rank 0 publishes weights. If recorded batches are trained again, nothing can be evaluated.
            asks=connections.publisher is not None,
            # Servers that share the learner's GPUs cannot evaluate while the learner trains.
            waits=self.gpus.shares,
            rated_by=learner.best_by if learner.keep_best else None,
        )

    def _reports(
        self,
        progress: Progress,
        publishing: Publishing,
        keeper: EpisodeKeeper,
        demonstrations: DemonstrationFeed | None,
        flops: ForwardFlops,
    ) -> StepReports:
        device, dtype = self.connections.ranks.device, DTYPES[self.settings.models.policy.dtype]
        return StepReports(
            self.connections.ranks,
            self.trainer.policy,
            progress,
            self.connections.metrics,
            publishing,
            keeper,
            demonstrations,
            flops,
            measured_peak(device, dtype) if device.type == "cuda" else None,
            self.settings.max_lag,
        )


def _export(settings: RunSettings, trainer: Trainer, connections: Connections, steps: int) -> None:
    """Write the policy, its adapter and the critic after `steps` steps as Hugging Face folders."""
    models, folder, policy = settings.models, settings.folder, trainer.policy.module
    ranks, stop = connections.ranks, connections.stop
    ranks.activity.enter("export")
    export(policy, models.policy, folder / "model", ranks, stop)
    if models.policy.lora.is_used:
        export_adapter(policy, models.policy, folder / "adapter", ranks, stop)
    critic = None if trainer.critic is None else trainer.critic.module
    values = critic if policy.value_head is None else shared_critic(policy)
    if values is not None:
        export_critic(values, models.critic, models.policy, folder / "critic", ranks, stop)
    if settings.uploads_model:
        connections.metrics.model(steps, folder / "model")


def remove_repeated(run_dir: Path, done: Progress, evaluates: Callable[[int], bool]) -> None:
    """Remove the metrics and kept episodes of steps and evaluations that a resumed learner repeats. The evaluation at
    the resumed step stays, unless it is due again.
    """

    def is_trained_again(step: int) -> bool:
        return step >= done.step

    def is_evaluated_again(step: int) -> bool:
        return step > done.step or step in done.evaluations or (step == done.step and evaluates(step))

    remove_kept(run_dir, is_trained_again)
    remove_kept(run_dir, is_evaluated_again, EVALUATED_FOLDER)
    remove_steps(metrics_file(run_dir, "learner"), is_trained_again)
    remove_steps(metrics_file(run_dir, "evaluation"), is_evaluated_again)
