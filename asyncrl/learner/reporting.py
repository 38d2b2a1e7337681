"""Reports a step: measures its values on all ranks, and logs them at its end, after publishing and saving."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.algorithms.batch import Episodes
from asyncrl.learner.batch.keeping import EpisodeKeeper
from asyncrl.learner.batch.local_batch import LocalBatch
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.checkpoint.rounded_adapters import kept_share
from asyncrl.learner.demonstrations import DemonstrationFeed
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.publishing import Publishing
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.step_metrics import Phases, StepMetrics, lag_counts, step_histograms, step_values, use_of_rank
from asyncrl.learner.step_result import StepResult
from asyncrl.modelling.flops import ForwardFlops
from asyncrl.observe.metrics import Sink, Value
from asyncrl.types import BatchPlan


@dataclass(frozen=True, slots=True, eq=False)
class TrainedStep:
    """One rank's part of a trained step, with the result of the whole step."""

    episodes: Episodes
    batch: LocalBatch
    result: StepResult
    demonstrations: int


@dataclass(eq=False)
class StepReports:
    """Logs each step to `metrics` on rank 0. `peak` is the FLOP/s of a rank's device, measured by large matrix
    products, or None if it is unknown."""

    ranks: Ranks
    policy: Trainable[Policy]
    progress: Progress
    metrics: Sink
    publishing: Publishing
    keeper: EpisodeKeeper
    demonstrations: DemonstrationFeed | None
    flops: ForwardFlops
    peak: float | None
    max_lag: int
    _row: StepMetrics | None = field(default=None, init=False)

    def measure(self, plan: BatchPlan, trained: TrainedStep | None, phases: Phases) -> None:
        """Measure a step, which trained nothing if `trained` is None. All ranks call this."""
        values: dict[str, Value] = {"steps_skipped": float(self.progress.steps_skipped)}
        if trained is None:
            self._row = StepMetrics(plan.step, values, phases)
            return
        lags = self.ranks.sum_pass_groups(lag_counts(trained.batch.tokens, plan.version, self.max_lag))
        branches = [length for each in trained.batch.lengths.values() for length in each]
        flops = float(self.flops(branches).sum()) / self.ranks.context_size
        used = self.ranks.sum(use_of_rank(flops, self.ranks.device, self.ranks.rank, self.ranks.size))
        values = step_values(plan, trained.episodes, lags, trained.result, self.progress)
        if self.demonstrations is not None:
            values |= self.demonstrations.values(self.progress.demonstrations)
        kept = kept_share(self.policy.module.model, self.publishing.dtype, self.ranks)
        if kept is not None:
            values["weights/adapters_kept"] = kept
        histograms = step_histograms(trained.episodes, lags, trained.result)
        self._row = StepMetrics(plan.step, values, phases, sum(plan.tokens), used, histograms)

    def report(self) -> None:
        """Log the measured step. The step is logged only once, even if the helper thread that ends this process also
        calls this method."""
        with self.ranks.stopping.lock:
            row, self._row = self._row, None
        if row is not None and self.ranks.rank == 0:
            learning_rate = self.policy.learning_rate(row.step)
            values = {**row.values(self.peak), **self.publishing.values(), **self.keeper.values()}
            self.metrics.log(row.step, {**values, "lr": learning_rate})
            self.metrics.histograms(row.step, row.histograms)
