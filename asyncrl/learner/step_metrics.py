"""The metrics of each learner step: where its time went, how old its data were, and what it learned."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Episodes, Tokens
from asyncrl.algorithms.metrics import episode_metrics
from asyncrl.learner.checkpoint import Progress
from asyncrl.learner.trainer import StepResult
from asyncrl.observe.metrics import Value
from asyncrl.types import BatchPlan

WAITING = ("wait", "fetch")
"""The phases in which the learner has nothing to compute."""


class Phases:
    """Seconds of one learner step by phase."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before = self._clock()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - before

    def values(self, tokens: int) -> dict[str, float]:
        """Seconds by phase, the share of them spent waiting, and trained tokens a second."""
        total = self._clock() - self._started
        idle = sum(self.seconds.get(name, 0.0) for name in WAITING)
        by_phase = {f"seconds/{name}": seconds for name, seconds in self.seconds.items()}
        return {**by_phase, "seconds/step": total, "idle": idle / total, "tokens_per_s": tokens / total}


def lag_counts(tokens: Tokens, version: int, max_lag: int) -> Tensor:
    """How many trajectories have lag 0, 1, ..., max_lag, and more than that: int64[max_lag + 2]."""
    _, index = tokens.sequence[tokens.mask].unique(return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    oldest = tokens.versions.new_full((count,), version).scatter_reduce(0, index, tokens.versions[tokens.mask], "amin")
    return torch.bincount((version - oldest).clamp(0, max_lag + 1).cpu(), minlength=max_lag + 2)


def lag_values(counts: Tensor) -> dict[str, Value]:
    """Mean and maximum of the trajectories' lags, and how many trajectories have each lag up to it."""
    lags = torch.arange(len(counts))
    largest = int(lags[counts > 0].max())
    return {
        "lag/mean": float((counts * lags).sum()) / float(counts.sum()),
        "lag/max": float(largest),
        **{f"lag/{lag}": float(count) for lag, count in enumerate(counts[: largest + 1])},
    }


def step_values(
    plan: BatchPlan, episodes: Episodes, lags: Tensor, result: StepResult, progress: Progress
) -> dict[str, Value]:
    """What one step learned, and from what; `lags` are `lag_counts` over all ranks."""
    finite = [norm for norm in result.norms if math.isfinite(norm)]
    return {
        "loss": result.loss,
        "grad_norm": sum(finite) / max(1, len(finite)),
        "outcome/mean": float(episodes.outcome.mean()),
        "version": float(plan.version),
        "tokens": float(sum(plan.tokens)),
        "tokens_sampled": float(sum(plan.sampled)),
        "trajectories_trained": float(progress.trajectories),
        "updates_skipped": float(progress.updates_skipped),
        "updates_too_large": float(progress.updates_too_large),
        "updates_empty": float(progress.updates_empty),
        "steps_skipped": float(progress.steps_skipped),
        **lag_values(lags),
        **episode_metrics(episodes),
        **result.summary,
    }
