"""Asks the replay to evaluate versions on held-out tasks, and logs each result at the step of the evaluated weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.batch.keeping import EpisodeKeeper
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.publishing import Versions
from asyncrl.learner.stop_request import StopRequest
from asyncrl.observe.metrics import Sink
from asyncrl.replay.held_out.tally import SAMPLE, evaluation_values

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Evaluating:
    """Evaluates the weights every `every` steps, before the first step and after the last. If `every` is 0, it requests
    no evaluations, but logs the results of evaluations that an earlier start requested. Only the rank with `asks`
    requests evaluations and logs their results to `metrics`. With `waits`, training continues only once each result has
    arrived. `rated_by` is the name of the result by which checkpoints are compared, to keep the best ones. None: they
    are not compared.
    """

    every: int
    versions: Versions
    replay: BatchSource
    checkpoints: Checkpoints
    keeper: EpisodeKeeper
    metrics: Sink
    progress: Progress
    stop: StopRequest
    asks: bool
    waits: bool
    rated_by: str | None

    def evaluate(self, steps: int) -> None:
        """Request an evaluation of the weights after `steps` steps if one is due, and log results that have arrived.
        With `waits`, or before the first step, wait until all results have arrived. Raises StoppedError on every rank:
        a rank was asked to stop.
        """
        self.stop.together(self._evaluate, steps, self.is_due(steps), self.waits or not steps)

    def finish(self, steps: int) -> None:
        """Evaluate the weights after `steps` steps, the last ones of the run, and log all results once they have
        arrived. Raises StoppedError on every rank: a rank was asked to stop."""
        is_last = steps == self.versions.total_steps
        # If the run ends early: weights that were due are already evaluated, and weights without a version of their own
        # cannot be evaluated.
        is_new = is_last or not (self.is_due(steps) or steps % self.versions.publish_every)
        self.stop.together(self._evaluate, steps, bool(self.every) and is_new, True)

    def _evaluate(self, steps: int, is_new: bool, wait: bool) -> None:
        if not self.asks:
            return
        if is_new:
            if not self.is_due(steps):
                # An earlier start of a solved run may have logged this evaluation, and `remove_repeated` has kept it.
                self.metrics.repeats(steps)
            self.replay.evaluate(self.versions.after(steps))
            self.progress.evaluations[steps] = self.versions.after(steps)
        self._log(wait)

    def is_due(self, steps: int) -> bool:
        """True if the weights after `steps` steps are evaluated."""
        return bool(self.every) and (steps % self.every == 0 or steps == self.versions.total_steps)

    def _log(self, wait: bool) -> None:
        """Log the complete evaluations. With `wait`, wait until all are complete."""
        pending = self.progress.evaluations
        for step, version in list(pending.items()):
            while (result := self.replay.evaluation(version, wait)) is None and wait:
                self.stop.check("stopped while waiting for an evaluation")
            if result is not None:
                if self.rated_by is not None:
                    if 2 * result["newer_tokens"] > result["tokens"]:
                        logger.warning(
                            "the checkpoint of step %d is rated by newer weights, which sampled most tokens of its "
                            "evaluation: see docs/evaluate.md",
                            step,
                        )
                    self.checkpoints.rate(step, float(result[self.rated_by]))
                values = {f"eval/{name}": value for name, value in evaluation_values(result).items()}
                self.metrics.log(step, {**values, "eval/version": float(version)})
                self.keeper.keep_evaluated(step, version, result[SAMPLE], self.replay)
                del pending[step]
