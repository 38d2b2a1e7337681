"""The learner's loop: the whole of training in one screen.

Step k trains plan k under policy version k // publish_every; version 0 is published before step 0. What a step does
depends on its plan, the weights before it and the run's seed alone, so a learner that resumes from a checkpoint, and is
handed the recorded plans again, repeats what the lost one did.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch

from asyncrl.algorithms.batch import Episodes
from asyncrl.config import locations
from asyncrl.config.changes import ConfigHistory
from asyncrl.config.schema import TrainConfig
from asyncrl.config.secrets import shown, shown_value
from asyncrl.errors import StoppedError
from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.batch.fetching import BatchFetcher
from asyncrl.learner.batch.keeping import EpisodeKeeper
from asyncrl.learner.batch.local_batch import LocalBatch
from asyncrl.learner.batch.minibatch import ImitationBatch
from asyncrl.learner.checkpoint.checkpoint import Checkpoints, Progress
from asyncrl.learner.checkpoint.gathering import gather, plan_gather
from asyncrl.learner.colocation import Turns
from asyncrl.learner.demonstrations import DemonstrationFeed
from asyncrl.learner.model.canary import canary_of
from asyncrl.learner.profiling import profiled
from asyncrl.learner.ranks.failures import StepFailures
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.step_metrics import (
    TRACK,
    Phases,
    StepMetrics,
    lag_counts,
    step_histograms,
    step_values,
    use_of_rank,
)
from asyncrl.learner.trainer import StepResult, Trainer
from asyncrl.machine.long_work import tracked
from asyncrl.modelling.flops import ForwardFlops, measured_peak
from asyncrl.modelling.images import TAKEN, ImageReader
from asyncrl.observe.metrics import Sink, Value
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.replay.tally import SAMPLE, evaluation_values
from asyncrl.types import BatchPlan
from asyncrl.weights.buckets import Bucket, GatheredBucket
from asyncrl.weights.canary import Canary
from asyncrl.weights.manifest import DTYPES
from asyncrl.weights.publisher import Publisher

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class TrainedStep:
    """What one rank has of a step that it trained."""

    episodes: Episodes
    batch: LocalBatch
    result: StepResult
    demonstrations: int


@dataclass(eq=False)
class Learner:
    """One rank's part in training. Rank 0 alone publishes (the others have no `publisher`), evaluates and logs.
    `metrics` gets the values of a step, all at once, and `evaluations` the results of an evaluation. Steps, publishes,
    checkpoints and evaluations are as `config` says; `history` has what each step trains with. `spans` get the phases
    of each step. Steps train `demonstrations`, if any, beside their episodes."""

    config: TrainConfig
    history: ConfigHistory
    ranks: Ranks
    trainer: Trainer
    checkpoints: Checkpoints
    replay: BatchSource
    publisher: Publisher | None
    metrics: Sink
    evaluations: Sink
    stop: threading.Event
    failures: StepFailures
    turns: Turns
    keeper: EpisodeKeeper
    spans: Spans = field(default_factory=NoSpans)
    demonstrations: DemonstrationFeed | None = None

    def __post_init__(self) -> None:
        policy = self.trainer.policy.module
        device, dtype = self.ranks.device, DTYPES[self.config.model.dtype]
        self._flops = ForwardFlops.of(policy, policy.model.config)
        reader = None if policy.vision is None else ImageReader.of(self.config.model, TAKEN)
        self._fetcher = BatchFetcher(
            self.config, self.history, self.ranks, policy, self._flops, self.replay, self.keeper, reader, self.spans
        )
        self._peak = measured_peak(device, dtype) if device.type == "cuda" else None
        self.progress = self.checkpoints.restore(self.trainer.models) or Progress()
        self._kept = self.progress.step
        self._is_whole = True
        self._row: StepMetrics | None = None
        # What the algorithm keeps is of the last step that was trained.
        self._step_config = self.history.at(max(0, self.progress.step - 1))
        self.trainer.configure(self._step_config)
        if self.progress.algorithm:
            self.trainer.algorithm.restore(self.progress.algorithm)
        self.progress.restore_models(self.trainer.models)
        if self.demonstrations is not None:
            self.demonstrations.resume(self.progress)

    def train(self) -> None:
        """Train to the last step, and have the weights measured on the way and at both ends.

        Raises StoppedError: asked to stop. A checkpoint has every step that was finished, unless the stop came within a
        step, after the first of its updates, or between two versions: then the steps after the newest checkpoint will
        be trained again. If the main thread of a rank is in the middle of a pass for long, the process ends instead.
        """
        self.ranks.leaving.keep = self._keep_within_pass
        try:
            self._train()
        except StoppedError:
            # All ranks must do alike, and one that is in the middle of a pass does no more than this.
            if self.ranks.leaving.is_abrupt:
                self._keep_within_pass()
            else:
                self._keep_finished(self._save_although_stopped)
            raise

    def _keep_finished(self, save: Callable[[], object]) -> None:
        """Save the steps that are done, if no checkpoint has them and their weights are whole."""
        # A checkpoint between two versions would be served under the number of the older one.
        is_version = self.progress.step % self.config.learner.publish_every == 0
        if self._is_whole and is_version and self.progress.step > self._kept:
            with self.ranks.activity.finishing("a checkpoint of the steps that are done"):
                save()

    def _save_although_stopped(self) -> None:
        if self.turns.begin_although_stopped():
            self._save()

    def _keep_within_pass(self) -> None:
        if self.turns.has_gpus:
            self._keep_finished(lambda: self.checkpoints.save_prepared(self._whole_progress()))
        self.checkpoints.close()
        self._report()

    def _train(self) -> None:
        config, progress = self.config.learner, self.progress
        self._publish(self._version(progress.step))
        if progress.step:
            # An earlier process may have ended after it wrote the checkpoint and before it reported it to the replay.
            self._together(self._report_checkpoint, progress.step)
        self.turns.end(self.trainer, self._version(progress.step), Phases(self.ranks.activity.enter))
        for step in self._steps():
            self.ranks.activity.enter("evaluate")
            with self.spans.span("evaluate", TRACK, step=step):
                self._together(self._evaluate, step)
            self._configure(step)
            phases = Phases(self.ranks.activity.enter, spans=self.spans, step=step)
            with phases("wait"):
                plan = self._together(self._plan, step)
            self.turns.begin(phases)
            trained = None if self._is_skipped(plan) else self._learn(plan, phases)
            if trained is None:
                progress.skip()
            else:
                result = trained.result
                progress.add(plan, result.skipped, result.too_large, result.empty, result.overflowed)
                progress.demonstrations += trained.demonstrations
            # A step that a stop cuts short may have moved it already.
            progress.algorithm = self.trainer.algorithm.state()
            self.checkpoints.prepare(self.trainer.models)
            self._is_whole = True
            # This needs all main threads, so it comes before any of them may be left in the middle of what follows.
            self._row = self._measure(plan, trained, phases)
            self.ranks.leaving.updated()
            try:
                self._keep(step, phases)
                self.turns.end(self.trainer, self._version(step + 1), phases)
            finally:
                self._report()
            phases.finish(version=plan.version, episodes=len(plan.ids), tokens=sum(plan.tokens))
        self._finish_checkpoint()
        self.ranks.activity.enter("evaluate")
        self._together(self._evaluate, config.total_steps)
        self.ranks.leaving.end()
        if self.ranks.rank == 0:
            self.checkpoints.clean()

    def _keep(self, step: int, phases: Phases) -> None:
        """Publish the weights after `step`, and begin a checkpoint, where they are due."""
        config = self.config.learner
        with phases("publish"):
            if self._version(step + 1) > self._version(step):
                self._publish(self._version(step + 1))
        with phases("checkpoint"):
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.total_steps:
                self._checkpoint()
            else:
                self._together(self._release)

    def _steps(self) -> Iterator[int]:
        steps, observe = range(self.progress.step, self.config.learner.total_steps), self.config.observe
        folder = locations.run_dir(self.config.run) / "profile"
        return profiled(steps, observe.profile_steps, observe.memory_steps, folder, self.ranks.rank)

    def _configure(self, step: int) -> None:
        """Use the values that hold at `step`. An adaptive KL keeps its coefficient unless algorithm.kl changed."""
        before, self._step_config = self._step_config, self.history.at(step)
        if before != self._step_config:
            kept = self.trainer.algorithm.state()
            self.trainer.configure(self._step_config)
            if before.algorithm.kl == self._step_config.algorithm.kl:
                self.trainer.algorithm.restore(kept)
        for each in self.history.changes:
            if each.step == step:
                new, old = shown(each.key, each.new), shown_value(each.key, each.old)
                logger.info("%s from step %d on, before %s", new, step, old)

    def _is_skipped(self, plan: BatchPlan) -> bool:
        """Whether the step trains nothing. All ranks agree, also if the plan was skipped between their requests."""
        if plan.skipped:
            logger.warning("step %d trains nothing: %s", plan.step, plan.skipped)
        return self.ranks.any(bool(plan.skipped))

    def _learn(self, plan: BatchPlan, phases: Phases) -> TrainedStep:
        """Train one plan. Raises StepFailedError: its training fails again and again."""
        with self.failures(plan.step):
            with phases("fetch"):
                fetched = self._together(self._fetcher.take, plan)
                imitation = self._imitation(plan.step, len(fetched.minibatches))
            episodes, minibatches = fetched.episodes, fetched.minibatches
            torch.manual_seed((self.config.run.seed << 32) + plan.step)
            with self._fetcher.ahead_of(plan.step + 1):
                with phases("proximal"):
                    batch = self.trainer.prepare(fetched.batch, episodes, minibatches)
                with phases("train"):
                    # A stop between two passes comes before the first update where a step has only one.
                    self._is_whole = len(minibatches) == 1
                    seen = self.keeper.seen(fetched.sample, batch)
                    result = self.trainer.learn(plan.step, batch, episodes, minibatches, seen, imitation)
                    self._is_whole = False
                with phases("keep"):
                    self.keeper.keep(fetched.sample, self.trainer.algorithm, batch, seen)
        return TrainedStep(episodes, batch, result, 0 if imitation is None else imitation.count)

    def _imitation(self, step: int, updates: int) -> ImitationBatch | None:
        """The demonstrations that a step trains beside its episodes, if it does."""
        if self.demonstrations is None or not self.trainer.trains_policy(step):
            return None
        config = self._step_config
        return self.demonstrations.beside(
            self.progress.demonstrations, config.algorithm.sft, config.learner, step, updates
        )

    def _together(self, request: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """This rank's answer to a request that may wait. Raises StoppedError on every rank if one is asked to stop."""

        def answer() -> T:
            result = request(*args, **kwargs)
            if self.stop.is_set():
                raise StoppedError("asked to stop")
            return result

        return self.ranks.together(answer)

    def _version(self, step: int) -> int:
        """The version of the weights that are served after `step` steps; the last weights always have their own."""
        every = self.config.learner.publish_every
        return -(-step // every) if step == self.config.learner.total_steps else step // every

    def _plan(self, step: int) -> BatchPlan:
        while (plan := self.replay.plan(step)) is None:
            if self.stop.is_set():
                raise StoppedError("stopped while waiting for a batch")
        return plan

    def _publish(self, version: int) -> None:
        policy, bucket_bytes = self.trainer.policy.module, self.config.weights.bucket_mb << 20
        steps = plan_gather(policy.weight_format, DTYPES[self.config.model.dtype], bucket_bytes)
        gathered = gather(policy.model, steps, policy.weight_format, self.ranks)
        what = f"publishing version {version}"
        buckets = tracked(gathered, what, len(steps), "buckets", self.ranks.activity)
        canary = canary_of(policy, version, self.config, self.ranks)
        self._together(self._push, version, [step.bucket for step in steps], buckets, canary)

    def _push(
        self, version: int, plan: Sequence[Bucket], buckets: Iterator[GatheredBucket], canary: Canary | None
    ) -> None:
        with self.ranks.activity.working():
            if self.publisher is None:
                # Every rank has its part in gathering.
                deque(buckets, maxlen=0)
            else:
                self.publisher.publish(version, plan, buckets, canary)
        if self.publisher is not None:
            self.replay.published(version)

    def _checkpoint(self) -> None:
        """Begin a checkpoint. The replay hears of it in the step at whose end it is complete."""
        self._finish_checkpoint()
        self._save()

    def _save(self) -> None:
        # Nobody may save in the place of this thread before it is known what this checkpoint has.
        with self.ranks.leaving.turn:
            self.checkpoints.save(self._whole_progress(), self.trainer.models)
            self._kept = self.progress.step

    def _whole_progress(self) -> Progress:
        self.progress.keep_models(self.trainer.models)
        return self.progress

    def _finish_checkpoint(self) -> None:
        self.checkpoints.wait()
        self._together(self._release)

    def _release(self) -> None:
        """Report a checkpoint that has become complete."""
        if steps := self.checkpoints.completed():
            self._report_checkpoint(steps)

    def _report_checkpoint(self, steps: int) -> None:
        if self.ranks.rank == 0:
            self.replay.checkpointed(steps, self.checkpoints.covered())

    def _evaluate(self, step: int) -> None:
        """Request an evaluation where one is due; wait for those of the first and the last weights."""
        if not self.config.learner.eval_every or self.ranks.rank != 0:
            return
        if self.evaluates(step):
            self.replay.evaluate(self._version(step))
            self.progress.evaluations[step] = self._version(step)
        # Servers that share our GPUs get no time for evaluations once we have begun to train.
        self._log_evaluations(wait=step in self._ends or self.turns.shares)

    def evaluates(self, step: int) -> bool:
        """Whether the weights after `step` steps are evaluated."""
        every = self.config.learner.eval_every
        return bool(every) and (step % every == 0 or step in self._ends)

    @property
    def _ends(self) -> tuple[int, int]:
        return 0, self.config.learner.total_steps

    def _log_evaluations(self, wait: bool) -> None:
        """Log the evaluations that are complete, or wait for all, each at the step whose weights were measured."""
        pending = self.progress.evaluations
        for step, version in list(pending.items()):
            while (result := self.replay.evaluation(version, wait)) is None and wait:
                if self.stop.is_set():
                    raise StoppedError("stopped while waiting for an evaluation")
            if result is not None:
                if self.config.learner.keep_best:
                    if 2 * result["newer_tokens"] > result["tokens"]:
                        logger.warning("the checkpoint of step %d is rated by newer weights: docs/evaluate.md", step)
                    self.checkpoints.rate(step, float(result[self.config.learner.best_by]))
                values = {f"eval/{name}": value for name, value in evaluation_values(result).items()}
                self.evaluations.log(step, {**values, "eval/version": float(version)})
                self.keeper.keep_evaluated(step, version, result[SAMPLE], self.replay)
                del pending[step]

    def _measure(self, plan: BatchPlan, trained: TrainedStep | None, phases: Phases) -> StepMetrics:
        values: dict[str, Value] = {"steps_skipped": float(self.progress.steps_skipped)}
        if trained is None:
            return StepMetrics(plan.step, values, phases)
        lags = self.ranks.sum_groups(lag_counts(trained.batch.tokens, plan.version, self.config.replay.max_lag))
        branches = [length for each in trained.batch.lengths.values() for length in each]
        flops = float(self._flops(branches).sum()) / self.ranks.context_size
        used = self.ranks.sum(use_of_rank(flops, self.ranks.device, self.ranks.rank, self.ranks.size))
        values = step_values(plan, trained.episodes, lags, trained.result, self.progress)
        if self.demonstrations is not None:
            values |= self.demonstrations.values(self.progress.demonstrations)
        histograms = step_histograms(trained.episodes, lags, trained.result)
        return StepMetrics(plan.step, values, phases, sum(plan.tokens), used, histograms)

    def _report(self) -> None:
        """Log the step that is done, once, also where another thread ends this process for the main thread."""
        with self.ranks.leaving.turn:
            row, self._row = self._row, None
        if row is not None and self.ranks.rank == 0:
            pushed = self.publisher.measured if self.publisher is not None else {}
            weights = {f"weights/{name}": value for name, value in pushed.items()}
            learning_rate = self.trainer.policy.learning_rate(row.step)
            kept = self.keeper.values()
            self.metrics.log(row.step, {**row.values(self._peak), **weights, **kept, "lr": learning_rate})
            self.metrics.histograms(row.step, row.histograms)
