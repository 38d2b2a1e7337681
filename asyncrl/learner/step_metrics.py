"""The metrics of each learner step: its times, the age of its data, and its results."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from asyncrl.algorithms.batch import Episodes, Tokens
from asyncrl.algorithms.metrics import episode_metrics
from asyncrl.algorithms.ratio_bins import CORRECTED, RAW, bin_edges
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.step_result import StepResult
from asyncrl.observe.metrics import Histogram, Value
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.observe.spans import Value as SpanValue
from asyncrl.types import BatchPlan

BINS = 32
"""The number of bins of a histogram."""
WAITING = ("wait", "fetch", "release", "onload", "offload")
"""The phases in which the learner has nothing to compute."""
TRACK = "steps"
"""The track of steps and their phases on the timeline."""


class Phases:
    """Measures how many seconds each phase of one learner step takes, by `clock`. `begin` is called with the name of
    each phase when it starts. `spans` gets the start and the end of each phase, and the number `step`."""

    def __init__(
        self,
        begin: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
        step: int | None = None,
    ) -> None:
        self._begin = begin
        self._clock = clock
        self._spans = spans or NoSpans()
        self._step = step
        self._started = clock()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._begin(name)
        before = self._clock()
        with record_function(name):
            yield
        after = self._clock()
        self.seconds[name] = self.seconds.get(name, 0.0) + after - before
        self._spans.add(name, before, after, TRACK, step=self._step)

    def finish(self, **values: SpanValue) -> None:
        """End the step. `values` go to the timeline."""
        self._spans.add("step", self._started, self._clock(), TRACK, step=self._step, **values)

    def values(self, tokens: int) -> dict[str, float]:
        """Return the seconds of each phase, the share of time in WAITING phases, and the trained tokens a second."""
        total = self._clock() - self._started
        # Another thread may call this while a phase ends.
        measured = dict(self.seconds)
        idle = sum(measured.get(name, 0.0) for name in WAITING)
        by_phase = {f"seconds/{name}": seconds for name, seconds in measured.items()}
        return {**by_phase, "seconds/step": total, "idle": idle / total, "tokens_per_s": tokens / total}


def use_of_rank(flops: float, device: torch.device, rank: int, size: int) -> Tensor:
    """Return the operations and the peak memory of one of `size` ranks in a step, as float64[1 + size]. Element 0
    is the number of operations, element 1 + `rank` the peak in bytes, and all other elements are 0. Sum this tensor
    over the ranks, and pass the sum to `use_values`.

    `flops` is the number of operations of a forward pass over the rank's sequences. On a GPU, the peak is measured
    since the last call, on the CPU since the process started.
    """
    use = torch.zeros(1 + size, dtype=torch.float64)
    use[0] = 3 * flops
    if device.type == "cuda":
        use[1 + rank] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        use[1 + rank] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return use


def use_values(use: Tensor, seconds: Mapping[str, float], peak: float | None) -> dict[str, Value]:
    """Return the largest peak memory of a rank. If `peak`, the FLOP/s of a rank's device, is known, also return the
    model FLOPs utilisation. `use` is the sum of `use_of_rank` over the ranks."""
    values: dict[str, Value] = {"memory/peak_gb": float(use[1:].max()) / 1e9}
    if peak is not None:
        possible = peak * (len(use) - 1)
        for phase in ("train", "step"):
            values[f"mfu/{phase}"] = float(use[0]) / (seconds[f"seconds/{phase}"] * possible)
    return values


@dataclass(frozen=True, slots=True, eq=False)
class StepMetrics:
    """The metrics of a step. The clock of its `phases` runs until the step is reported.

    - `learned`: the metrics that do not depend on the clock.
    - `tokens`: the number of trained tokens.
    - `used`: the sum of `use_of_rank` over the ranks. None: the step trained nothing.
    - `histograms`: the distributions of some metrics.
    """

    step: int
    learned: Mapping[str, Value]
    phases: Phases
    tokens: int = 0
    used: Tensor | None = None
    histograms: Mapping[str, Histogram] = field(default_factory=dict)

    def values(self, peak: float | None) -> dict[str, Value]:
        """Return all metrics as they are now. `peak` is the FLOP/s of a rank's device. None: it is not known."""
        seconds = self.phases.values(self.tokens)
        used = {} if self.used is None else use_values(self.used, seconds, peak)
        return {**self.learned, **used, **seconds}


def lag_counts(tokens: Tokens, version: int, max_lag: int) -> Tensor:
    """Count trajectories by lag (staleness), as int64[max_lag + 2]. Element k counts the trajectories of lag k, and the
    last element counts all trajectories with a lag above `max_lag`. The lag of a trajectory is the lag of its oldest
    trained token. Demonstrations are not counted, because they have no lag."""
    sampled = tokens.mask if tokens.demonstrated is None else tokens.mask & ~tokens.demonstrated
    sampled = sampled if tokens.old is None else sampled & ~tokens.old
    _, index = tokens.sequence[sampled].unique(return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    oldest = tokens.versions.new_full((count,), version).scatter_reduce(0, index, tokens.versions[sampled], "amin")
    return torch.bincount((version - oldest).clamp(0, max_lag + 1).cpu(), minlength=max_lag + 2)


def lag_values(counts: Tensor) -> dict[str, Value]:
    """Return the mean and the maximum of the trajectories' lags, and the number of trajectories with each lag.

    Returns no metrics if no trajectory was counted.
    """
    if not counts.any():
        return {}
    lags = torch.arange(len(counts))
    largest = int(lags[counts > 0].max())
    return {
        "lag/mean": float((counts * lags).sum()) / float(counts.sum()),
        "lag/max": float(largest),
        **{f"lag/{lag}": float(count) for lag, count in enumerate(counts[: largest + 1])},
    }


def step_histograms(episodes: Episodes, lags: Tensor, result: StepResult) -> dict[str, Histogram]:
    """Return the distributions of the trained trajectories and tokens; `lags` are `lag_counts` over all ranks."""
    counts, edges = lags.tolist(), bin_edges()
    found = {
        "lag": Histogram(tuple(counts), tuple(lag - 0.5 for lag in range(len(counts) + 1))),
        "reward": spread(episodes.reward[episodes.samples]),
        "length": spread(episodes.lengths[episodes.samples]),
    }
    if RAW in result.ratios:
        found["log_ratio"] = Histogram(tuple(result.ratios[RAW]), edges)
    if CORRECTED in result.ratios:
        found["weight"] = Histogram(tuple(result.ratios[CORRECTED]), tuple(map(math.exp, edges)))
    return found


def spread(values: Tensor) -> Histogram:
    """Count the finite values float[S] in each of BINS bins of equal width."""
    found = values.double().cpu().numpy()
    counts, edges = np.histogram(found[np.isfinite(found)], BINS)
    return Histogram(tuple(counts.tolist()), tuple(edges.tolist()))


def step_values(
    plan: BatchPlan, episodes: Episodes, lags: Tensor, result: StepResult, progress: Progress
) -> dict[str, Value]:
    """Return the results of one step and the statistics of its data; `lags` are `lag_counts` over all ranks."""
    # A step without updates of the policy has no norm. A norm of 0 would mean an update that learned nothing.
    norms = {"grad_norm": result.mean_norm} if result.norms else {}
    lengths, shown = episodes.lengths, episodes.demonstrated
    return {
        "loss": result.loss,
        **norms,
        "outcome/mean": float(episodes.outcome[episodes.samples].mean()),
        "version": float(plan.version),
        "tokens": float(sum(plan.tokens)),
        "tokens_sampled": float((lengths if shown is None else lengths[~shown]).sum()),
        "trajectories_trained": float(progress.trajectories),
        "updates_skipped": float(progress.updates_skipped),
        "updates_too_large": float(progress.updates_too_large),
        "updates_empty": float(progress.updates_empty),
        "updates_overflowed": float(progress.updates_overflowed),
        "steps_skipped": float(progress.steps_skipped),
        **lag_values(lags),
        **episode_metrics(episodes),
        **result.summary,
    }
