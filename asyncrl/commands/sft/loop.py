"""The loop of `asyncrl sft`: each step trains the next demonstrations.

A step depends only on the weights before it, the run's seed and the position in the demonstrations. A checkpoint has
all three, so a resumed run ends with exactly the same weights.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from asyncrl.config.schema import LearnerConfig
from asyncrl.learner.batch.minibatch import ImitationBatch
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.colocation import SharedGpus
from asyncrl.learner.demonstrations import DemonstrationFeed
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.step_metrics import Phases, StepMetrics, use_of_rank
from asyncrl.learner.step_result import StepResult
from asyncrl.learner.stopping import StopCheckpoint
from asyncrl.learner.trainer import Trainer
from asyncrl.modelling.flops import ForwardFlops, measured_peak
from asyncrl.observe.metrics import Sink, Value
from asyncrl.weights.manifest import DTYPES

HELD_OUT_AT_ONCE = 512
"""The number of held-out demonstrations whose tokens are in memory at once."""


@dataclass(eq=False)
class Imitation:
    """Fine-tunes the policy of `trainer` on the demonstrations of `feed`, as one rank.

    Rank 0 logs the values of each step to `metrics`, and the loss on `held_out` to `evaluations`.
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
        self.saved = self.progress.step
        gpus = SharedGpus(self.ranks, None, self.stop)
        self._at_stop = StopCheckpoint(self.ranks, gpus, self, report=lambda: None, publish_every=1)

    def train(self) -> None:
        """Train to the last step. Raises StoppedError: `stop` was set.

        The finished steps are then saved, unless the stop came after the first update of an unfinished step.
        """
        with self._at_stop.saving_finished_steps():
            self._train()

    def _train(self) -> None:
        config, total = self.learner, self.learner.total_steps
        for step in range(self.progress.step, total):
            self._evaluate(step)
            self._step(step)
            if self.progress.step % config.checkpoint_every == 0 or self.progress.step == total:
                self.save()
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
            # If a step has only one update, a stop between two of its passes comes before that update.
            self._at_stop.weights_are_whole = config.minibatches == 1
            result = self.trainer.imitate(step, batch)
            self._at_stop.weights_are_whole = False
        progress.step += 1
        progress.demonstrations += batch.count
        progress.tokens += sum(batch.tokens)
        progress.count_updates(result.skipped, result.too_large, result.empty, result.overflowed)
        self.checkpoints.prepare(self.trainer.models)
        self._at_stop.weights_are_whole = True
        self.ranks.stopping.updated()
        self._log(step, batch, result, phases, int(self.feed.rendered.lengths[members].sum()))

    def _members(self) -> list[int]:
        """The demonstrations of the next step: a batch, or fewer at the end of an epoch."""
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
        """Log the held-out loss after `step` steps: before the first step, after the last step, and every `eval_every`
        steps."""
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

    def save(self) -> None:
        """Begin a checkpoint, after the previous one is complete."""
        self.checkpoints.wait()
        # The helper thread, which may call `save_prepared`, must not start a second checkpoint before this one is
        # recorded.
        with self.ranks.stopping.lock:
            self.checkpoints.save(self._with_norms(), self.trainer.models)
            self.saved = self.progress.step

    def save_prepared(self) -> None:
        """Begin a checkpoint of the weights that `checkpoints.prepare` was last called with.

        A pass may be running, but no weight may have changed since that call.
        """
        self.checkpoints.save_prepared(self._with_norms())

    def _with_norms(self) -> Progress:
        self.progress.keep_models(self.trainer.models)
        return self.progress
