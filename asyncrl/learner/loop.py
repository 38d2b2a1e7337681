"""The learner's loop: the story of a step, from its plan to its metrics.

Step k trains the episodes that plan k names. Version 0 is published before step 0, and before step k the newest version
is k // publish_every.

The result of a step depends only on its plan, the weights before the step and the run's seed. So a learner that resumes
from a checkpoint, and is given the recorded plans again, repeats the lost steps exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from asyncrl.config.secrets import shown, shown_value
from asyncrl.learner.batch.fetching import BatchFetcher
from asyncrl.learner.batch.keeping import EpisodeKeeper
from asyncrl.learner.batch.minibatch import ImitationBatch
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.checkpointing import Checkpointing
from asyncrl.learner.colocation import SharedGpus
from asyncrl.learner.demonstrations import DemonstrationFeed
from asyncrl.learner.evaluating import Evaluating
from asyncrl.learner.plans import Plans
from asyncrl.learner.publishing import Publishing, Versions
from asyncrl.learner.ranks.failures import StepFailures
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.reporting import StepReports, TrainedStep
from asyncrl.learner.settings import SettingsHistory
from asyncrl.learner.step_metrics import TRACK, Phases
from asyncrl.learner.stop_request import StopRequest
from asyncrl.learner.stopping import StopCheckpoint
from asyncrl.learner.trainer import Trainer
from asyncrl.observe.spans import Spans
from asyncrl.types import BatchPlan

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Learner:
    """One rank's part in training. Only rank 0 publishes, evaluates and logs.

    `history` has the settings of each step. `prepare` compiles the layers and fits the training into memory. `profiled`
    yields the steps that it gets, and records profiles of some. Steps also train `demonstrations`, if there are any.
    """

    total_steps: int
    seed: int
    history: SettingsHistory
    versions: Versions
    ranks: Ranks
    stop: StopRequest
    trainer: Trainer
    prepare: Callable[[], None]
    progress: Progress
    plans: Plans
    fetcher: BatchFetcher
    keeper: EpisodeKeeper
    demonstrations: DemonstrationFeed | None
    failures: StepFailures
    gpus: SharedGpus
    publishing: Publishing
    evaluating: Evaluating
    checkpointing: Checkpointing
    reports: StepReports
    at_stop: StopCheckpoint
    profiled: Callable[[Iterable[int]], Iterator[int]]
    spans: Spans

    def train(self) -> None:
        """Train to the last step, or until the policy solves the tasks. Raises StoppedError: this process was asked to
        stop. `at_stop` then saves the finished steps."""
        with self.at_stop.saving_finished_steps():
            self._begin()
            for step in self.profiled(range(self.progress.step, self.total_steps)):
                self._evaluate(step)
                self._configure(step)
                if not self._step(step):
                    self._save_early()
                    break
            self._finish()

    def _begin(self) -> None:
        version = self.versions.after(self.progress.step)
        self.publishing.publish(version)
        # The engines can already generate during this preparation, which changes no weight.
        self.prepare()
        self.checkpointing.report_restored()
        self.gpus.release(self.trainer, version, Phases(self.ranks.activity.enter))

    def _step(self, step: int) -> bool:
        """Train one step, publish its weights, and save and report it. False: there is no such step, since the policy
        solves the tasks."""
        phases = Phases(self.ranks.activity.enter, spans=self.spans, step=step)
        with phases("wait"):
            plan = self.plans.of_step(step)
        if plan is None:
            return False
        self.gpus.acquire(phases)
        trained = None if self.plans.is_skipped(plan) else self._train(plan, phases)
        self._count(plan, trained)
        # Measures before `stopping.updated`, since measuring needs the main threads of all ranks. After
        # `stopping.updated`, a helper thread may act for a main thread.
        self.reports.measure(plan, trained, phases)
        self.ranks.stopping.updated()
        try:
            with phases("publish"):
                if self.versions.after(step + 1) > self.versions.after(step):
                    self.publishing.publish(self.versions.after(step + 1))
            with phases("checkpoint"):
                self.checkpointing.end_step(step + 1)
            self.gpus.release(self.trainer, self.versions.after(step + 1), phases)
        finally:
            self.reports.report()
        phases.finish(version=plan.version, episodes=len(plan.ids), tokens=sum(plan.tokens))
        return True

    def _save_early(self) -> None:
        """Save the finished steps of a run that ends before its last step."""
        phases = Phases(self.ranks.activity.enter)
        self.gpus.acquire(phases)
        with phases("checkpoint"):
            self.at_stop.save_finished_steps()
        self.gpus.release(self.trainer, self.versions.after(self.progress.step), phases)

    def _finish(self) -> None:
        self.checkpointing.finish()
        self.ranks.activity.enter("evaluate")
        self.evaluating.finish(self.progress.step)
        self.ranks.stopping.end()
        if self.ranks.rank == 0:
            self.checkpointing.checkpoints.clean()

    def _evaluate(self, step: int) -> None:
        self.ranks.activity.enter("evaluate")
        with self.spans.span("evaluate", TRACK, step=step):
            self.evaluating.evaluate(step)

    def _configure(self, step: int) -> None:
        """Use the settings of `step`. An adaptive KL penalty keeps its coefficient unless algorithm.kl changed."""
        before, settings = self.history.at(max(0, step - 1)), self.history.at(step)
        if before != settings:
            kept = self.trainer.algorithm.state()
            self.trainer.configure(settings)
            if before.algorithm.kl == settings.algorithm.kl:
                self.trainer.algorithm.restore(kept)
        for each in self.history.changes_at(step):
            new, old = shown(each.key, each.new), shown_value(each.key, each.old)
            logger.info("%s from step %d on; it was %s before", new, step, old)

    def _train(self, plan: BatchPlan, phases: Phases) -> TrainedStep:
        """Fetch one plan and train it. Raises StepFailedError: the step has failed several times in the same way,
        although the learner was restarted each time."""
        with self.failures(plan.step):
            with phases("fetch"):
                fetched = self.stop.together(self.fetcher.take, plan)
                imitation = self._imitation(plan.step, len(fetched.minibatches))
            episodes, minibatches = fetched.episodes, fetched.minibatches
            torch.manual_seed((self.seed << 32) + plan.step)
            with self.fetcher.ahead_of(plan.step + 1):
                with phases("proximal"):
                    trains_policy = self.trainer.trains_policy(plan.step)
                    batch = self.trainer.prepare(fetched.batch, episodes, minibatches, trains_policy)
                with phases("train"):
                    # If a step has only one update, no weight has changed when a stop comes between two passes.
                    self.at_stop.weights_are_whole = len(minibatches) == 1
                    seen = self.keeper.seen(fetched.sample, batch)
                    result = self.trainer.learn(plan.step, batch, episodes, minibatches, seen, imitation)
                    self.at_stop.weights_are_whole = False
                with phases("keep"):
                    self.keeper.keep(fetched.sample, self.trainer.algorithm, batch, seen)
        return TrainedStep(episodes, batch, result, 0 if imitation is None else imitation.count)

    def _imitation(self, step: int, updates: int) -> ImitationBatch | None:
        """Build the batch of demonstrations that a step trains in addition to its episodes. None: it trains no
        demonstrations."""
        if self.demonstrations is None or not self.trainer.trains_policy(step):
            return None
        settings, position = self.history.at(step), self.progress.demonstrations
        return self.demonstrations.batch_of_step(position, settings.algorithm.sft, settings.learner, step, updates)

    def _count(self, plan: BatchPlan, trained: TrainedStep | None) -> None:
        """Count the step as finished, so that later checkpoints include it."""
        if trained is None:
            self.progress.skip()
        else:
            result = trained.result
            self.progress.add(plan, result.skipped, result.too_large, result.empty, result.overflowed)
            self.progress.demonstrations += trained.demonstrations
        # Keeps a copy of the state: when a stop interrupts a later step, that step may already have changed the
        # algorithm's own state.
        self.progress.algorithm = self.trainer.algorithm.state()
        self.checkpointing.checkpoints.prepare(self.trainer.models)
        self.at_stop.weights_are_whole = True
