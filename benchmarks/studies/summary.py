"""Summarises the rows of a study: the figures of each combination of levels, with their spread over the seeds.

A run that failed or collapsed counts in its cell. If a run never reached the target, its samples to the target are
infinite. A failed run has no figures of its end or of the whole run, such as the last accuracy. The spread of a figure
is its least and its greatest value over the seeds that have it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.studies.figures import FAILED, Row, collapsed, mean_accuracy
from benchmarks.studies.study import Levels

EQUAL_START = 0.01
"""The largest difference between accuracies of one policy before training. Each machine makes its own policy for a
seed, and larger differences mean different policies."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median over the seeds that have a value, with the least and the greatest; `count` is their number."""

    median: float
    least: float
    greatest: float
    count: int

    @staticmethod
    def of(values: Iterable[float | None]) -> Spread | None:
        known = [float(value) for value in values if value is not None]
        return Spread(statistics.median(known), min(known), max(known), len(known)) if known else None


@dataclass(frozen=True, slots=True)
class Cell:
    """The runs of one combination of levels. `reasons` are of failed runs. `gain` is the mean accuracy over the run,
    less that of the baseline's run with the same seed, if both began with the same policy."""

    levels: Levels
    lr: float
    seeds: int
    failed: int
    collapsed: int
    reasons: Sequence[str]
    samples_to_target: Spread | None
    seconds_to_target: Spread | None
    step_seconds: Spread | None
    best: Spread | None
    last: Spread | None
    gain: Spread | None
    lag_mean: Spread | None
    lag_max: Spread | None
    entropy: Spread | None
    ess: Spread | None
    k3: Spread | None
    evicted_share: Spread | None
    trained_length: Spread | None
    idle: Spread | None
    reward_change: Spread | None
    agreement_change: Spread | None
    hack_alarms: Spread | None
    run_seconds: Spread | None


def cell_of(
    levels: Levels,
    lr: float,
    runs: Sequence[Sequence[Row]],
    target: float,
    baseline: Sequence[Sequence[Row]] = (),
) -> Cell:
    """Make a cell from runs, each a list of rows by rising step. `baseline` are the runs of the cell for comparison."""
    reached = [first_at(rows, target) or {"samples": math.inf, "seconds": math.inf} for rows in runs]
    lasts = [rows[-1] for rows in runs]
    whole = [rows for rows in runs if rows[-1]["status"] != FAILED]
    return Cell(
        levels=levels,
        lr=lr,
        seeds=len(runs),
        failed=sum(row["status"] == FAILED for row in lasts),
        collapsed=sum(collapsed([row["accuracy"] for row in rows]) for rows in whole),
        reasons=sorted({row["reason"] for row in lasts if row["status"] == FAILED}),
        samples_to_target=Spread.of(row["samples"] for row in reached),
        seconds_to_target=Spread.of(row["seconds"] for row in reached),
        step_seconds=Spread.of(rows[-1]["seconds"] for rows in whole),
        best=Spread.of(max(_known(rows, "accuracy"), default=None) for rows in whole),
        last=Spread.of(rows[-1]["accuracy"] for rows in whole),
        gain=Spread.of(_gains(runs, baseline)),
        lag_mean=Spread.of(_mean(rows, "lag_mean") for rows in whole),
        lag_max=Spread.of(max(_known(rows, "lag_max"), default=None) for rows in runs),
        entropy=Spread.of(rows[-1]["entropy"] for rows in whole),
        # A divergence of exactly 0 means that no policy was recomputed and compared.
        ess=Spread.of(min(_known(rows, "ess"), default=None) if _mean(rows, "k3") != 0 else None for rows in runs),
        k3=Spread.of(_mean(rows, "k3") or None for rows in whole),
        evicted_share=Spread.of(_evicted_share(rows[-1]) for rows in whole),
        trained_length=Spread.of(_trained_length(rows[-1]) for rows in whole),
        idle=Spread.of(_mean(rows, "idle") for rows in whole),
        reward_change=Spread.of(_change(rows, "reward") for rows in whole),
        agreement_change=Spread.of(_change(rows, "agreement") for rows in whole),
        # The largest, since a resumed run counts from 0 again.
        hack_alarms=Spread.of(max(_known(rows, "hack_alarms"), default=None) for rows in runs),
        run_seconds=Spread.of(row["run_seconds"] for row in lasts),
    )


def first_at(rows: Sequence[Row], target: float) -> Row | None:
    """The first evaluation with the target accuracy."""
    return next((row for row in rows if row["accuracy"] is not None and row["accuracy"] >= target), None)


def _gains(runs: Sequence[Sequence[Row]], baseline: Sequence[Sequence[Row]]) -> Iterator[float]:
    """The gain of each seed that has a mean accuracy on both sides, and began with the same policy."""
    compared = {rows[0]["seed"]: rows for rows in baseline}
    for rows in runs:
        other = compared.get(rows[0]["seed"])
        ours, theirs = mean_accuracy(rows), None if other is None else mean_accuracy(other)
        if other is not None and ours is not None and theirs is not None and _begin_alike(rows, other):
            yield ours - theirs


def _begin_alike(rows: Sequence[Row], other: Sequence[Row]) -> bool:
    ours, theirs = (_known(each, "accuracy")[0] for each in (rows, other))
    return abs(ours - theirs) <= EQUAL_START


def _known(rows: Sequence[Row], column: str) -> list[float]:
    return [row[column] for row in rows if row[column] is not None]


def _mean(rows: Sequence[Row], column: str) -> float | None:
    values = _known(rows, column)
    return statistics.mean(values) if values else None


def _change(rows: Sequence[Row], column: str) -> float | None:
    """The change from the first known value to the last."""
    values = _known(rows, column)
    return values[-1] - values[0] if len(values) > 1 else None


def _evicted_share(last: Row) -> float | None:
    """The share of evicted trajectories among the trained and evicted ones."""
    if last["samples"] is None or last["evicted"] is None:
        return None
    both = last["samples"] + last["evicted"]
    return float(last["evicted"] / both) if both else 0.0


def _trained_length(last: Row) -> float | None:
    """The mean length of the trained episodes, divided by that of all sampled ones. `None` if none was evicted."""
    trained, sampled = last.get("length_trained"), last.get("length_sampled")
    return trained / sampled if trained and sampled and last.get("length_evicted") else None
