"""The loop of `asyncrl sft`: each step trains the next demonstrations.

A step depends only on the weights before it, the run's seed and the position in the demonstrations; a checkpoint keeps
all three. So a run that resumes ends with the same bits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncrl.config.schema import LearnerConfig
from asyncrl.errors import StoppedError
from asyncrl.learner.batch.minibatch import ImitationBatch
from asyncrl.learner.checkpoint.checkpoint import Checkpoints, Progress
from asyncrl.learner.demonstrations import DemonstrationFeed
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.step_metrics import Phases, StepMetrics, use_of_rank
from asyncrl.learner.step_result import StepResult
from asyncrl.learner.trainer import Trainer
from asyncrl.machine.long_work import LINE_S, LongWork
from asyncrl.modelling.flops import ForwardFlops, measured_peak
from asyncrl.observe.metrics import Sink, Value
from asyncrl.weights.manifest import DTYPES

logger = logging.getLogger(__name__)

HELD_OUT_AT_ONCE = 512
"""Held-out demonstrations whose tokens are in memory together."""


@dataclass(eq=False)
class Imitation:
    """One rank's part in fine-tuning the policy of `trainer` on the demonstrations of `feed`. Rank 0 alone logs:
    `metrics` gets the values of a step, and `evaluations` the loss on those of `held_out`, if there are such.
    """

    learner: LearnerConfig
    seed: int
    dtype: str
    ranks: Ranks
    trainer: Trainer
    checkpoints: Checkpoints
    feed: DemonstrationFeed
    held_out: DemonstrationFeed | None
    metrics: Sink
    evaluations: Sink
    stop: threading.Event

    def __post_init__(self) -> None:
        policy = self.trainer.policy.module
        self._flops = ForwardFlops.of(policy, policy.model.config)
        device = self.ranks.device
        self._peak = measured_peak(device, DTYPES[self.dtype]) if device.type == "cuda" else None
        self.progress = self.checkpoints.restore(self.trainer.models) or Progress()
        self.progress.restore_models(self.trainer.models)
        self.feed.resume(self.progress)
        self._kept = self.progress.step
        self._is_whole = True

    def train(self) -> None:
        """Train to the last step. Raises StoppedError: asked to stop; a checkpoint has every step that was finished,
        unless the stop came after the first of several updates of a step."""
        self.ranks.stopping.save = self._keep_within_pass
        try:
            self._train()
        except StoppedError:
            # As in the learner's loop: a rank that is in the middle of a pass does no more than this.
            if self.ranks.stopping.is_abrupt:
                self._keep_within_pass()
            else:
                self._keep_finished(self._save)
            raise

    def _train(self) -> None:
        config, total = self.learner, self.learner.total_steps
        work, said_s = LongWork("fine-tuning", total - self.progress.step, "steps"), 0.0
        for step in range(self.progress.step, total):
            self._evaluate(step)
            self._step(step)
            if self.progress.step % config.checkpoint_every == 0 or self.progress.step == total:
                self._save()
            work.done += 1
            self.ranks.activity.work = work.text
            if self.ranks.rank == 0 and work.seconds - said_s >= LINE_S:
                said_s = work.seconds
                logger.info("%s", work.text)
        self._evaluate(total)
        self.checkpoints.wait()
        self.ranks.stopping.end()
        if self.ranks.rank == 0:
            self.checkpoints.clean()

    def _step(self, step: int) -> None:
        phases = Phases(self.ranks.activity.enter)
        config, progress = self.learner, self.progress
        with phases("fetch"):
            members = self._members()
            batch = self.feed.build(members, config, config.minibatches)
        torch.manual_seed((self.seed << 32) + step)
        with phases("train"):
            # A stop between two passes comes before the first update where a step has only one.
            self._is_whole = config.minibatches == 1
            result = self.trainer.imitate(step, batch)
            self._is_whole = False
        progress.step += 1
        progress.demonstrations += batch.count
        progress.tokens += sum(batch.tokens)
        progress.count_updates(result.skipped, result.too_large, result.empty, result.overflowed)
        self.checkpoints.prepare(self.trainer.models)
        self._is_whole = True
        self.ranks.stopping.updated()
        self._log(step, batch, result, phases, int(self.feed.rendered.lengths[members].sum()))

    def _members(self) -> list[int]:
        """The demonstrations of the next step: those that are left of an epoch, if these are fewer than a batch."""
        place, count = self.progress.demonstrations, len(self.feed.rendered)
        return self.feed.next(place, min(self.learner.batch_size, count - place % count))

    def _log(self, step: int, batch: ImitationBatch, result: StepResult, phases: Phases, tokens: int) -> None:
        lengths = [length for each in batch.batch.lengths.values() for length in each]
        flops, device = float(self._flops(lengths).sum()) / self.ranks.context_size, self.ranks.device
        used = self.ranks.sum(use_of_rank(flops, device, self.ranks.rank, self.ranks.size))
        if self.ranks.rank:
            return
        progress = self.progress
        values: dict[str, Value] = {
            "loss": result.loss,
            "grad_norm": result.mean_norm,
            "tokens": float(tokens),
            "lr": self.trainer.policy.learning_rate(step),
            "updates_skipped": float(progress.updates_skipped),
            "updates_too_large": float(progress.updates_too_large),
            "updates_empty": float(progress.updates_empty),
            "updates_overflowed": float(progress.updates_overflowed),
            **result.summary,
            **self.feed.values(progress.demonstrations),
        }
        row = StepMetrics(step, values, phases, tokens, used)
        self.metrics.log(step, row.values(self._peak))

    def _evaluate(self, step: int) -> None:
        """Log the loss on the held-out demonstrations after `step` steps, where it is due: at both ends too."""
        config, feed = self.learner, self.held_out
        if feed is None or not (
            step in (0, config.total_steps) or (config.eval_every and step % config.eval_every == 0)
        ):
            return
        self.ranks.activity.enter("evaluate")
        total, tokens = 0.0, 0
        for first in range(0, len(feed.rendered), HELD_OUT_AT_ONCE):
            members = range(first, min(first + HELD_OUT_AT_ONCE, len(feed.rendered)))
            batch = feed.build(members, config)
            total += self.trainer.imitation_loss(batch)
            tokens += sum(batch.tokens)
        loss = total / tokens
        if self.ranks.rank == 0:
            self.evaluations.log(step, {"eval/loss": loss, "eval/tokens": float(tokens)})
            if config.keep_best:
                self.checkpoints.rate(step, -loss)

    def _save(self) -> None:
        self.checkpoints.wait()
        # The helper thread must not start a second checkpoint before this one is recorded.
        with self.ranks.stopping.lock:
            self.checkpoints.save(self._with_norms(), self.trainer.models)
            self._kept = self.progress.step

    def _with_norms(self) -> Progress:
        self.progress.keep_models(self.trainer.models)
        return self.progress

    def _keep_finished(self, save: Callable[[], object]) -> None:
        """Save the steps that are done, if no checkpoint has them and their weights are whole."""
        if self._is_whole and self.progress.step > self._kept:
            with self.ranks.activity.finishing("a checkpoint of the steps that are done"):
                save()

    def _keep_within_pass(self) -> None:
        self._keep_finished(lambda: self.checkpoints.save_prepared(self._with_norms()))
        self.checkpoints.close()
