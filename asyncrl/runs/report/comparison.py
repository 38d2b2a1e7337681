"""Compares several runs: their differences, their results, and their curves over the same number of samples, tokens
and seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from asyncrl.config.changes import HOST_KEYS
from asyncrl.errors import ConfigError
from asyncrl.runs.environment import Environment
from asyncrl.runs.report.reported import NO_ADDRESS, ReportedRun

SEED = "run.seed"
NOT_COMPARED = ("run.name", *HOST_KEYS)
PARTS = 4
"""The shortest run is divided into this many equal parts, and the tables have a value at the end of each part."""
WINDOW = 0.125
"""A value of training batches in a table is a mean over the batches shortly before its point. These batches take this
share of the shortest run."""


@dataclass(frozen=True, slots=True)
class RunExtent:
    """The extent of a run in some unit, such as samples: it is `at[i]` after `steps[i]` learner steps. Both lists begin
    with 0."""

    steps: Sequence[float]
    at: Sequence[float]

    def after(self, steps: float) -> float:
        """The extent after `steps` steps, by linear interpolation between known points."""
        return float(np.interp(steps, self.steps, self.at))


@dataclass(frozen=True, slots=True)
class Axis:
    """A unit of a run's extent, such as samples. `of` returns `None` for a run whose metrics lack the unit."""

    name: str
    of: Callable[[ReportedRun], RunExtent | None]


@dataclass(frozen=True, slots=True)
class Measure:
    """A compared metric. Held-out metrics have values only at evaluations. All other metrics come from training
    batches, and are noisy."""

    title: str
    metric: str
    is_held_out: bool = False

    def points(self, run: ReportedRun) -> list[tuple[int, float]]:
        """Pairs of a number of finished steps and the value after these steps."""
        rows, first = (run.evaluations, 0) if self.is_held_out else (run.steps, 1)
        return [(row["step"] + first, float(row[self.metric])) for row in rows if self.metric in row]


def _counted(metric: str) -> Callable[[ReportedRun], RunExtent | None]:
    """Return a function that reads the extent from a counter of the learner."""

    def progress(run: ReportedRun) -> RunExtent | None:
        rows = [row for row in run.steps if metric in row]
        return RunExtent([0, *(row["step"] + 1 for row in rows)], [0, *(row[metric] for row in rows)]) if rows else None

    return progress


def _summed(metric: str) -> Callable[[ReportedRun], RunExtent | None]:
    """Return a function that sums a value which the learner logs for each step. A step without a row counts as the mean
    of the rows before and after it."""

    def progress(run: ReportedRun) -> RunExtent | None:
        rows = [row for row in run.steps if metric in row]
        if not rows:
            return None
        total = rows[0][metric] * (rows[0]["step"] + 1)
        at = [0.0, total]
        for before, row in pairwise(rows):
            missing = row["step"] - before["step"] - 1
            total += row[metric] + missing * (before[metric] + row[metric]) / 2
            at.append(total)
        return RunExtent([0, *(row["step"] + 1 for row in rows)], at)

    return progress


AXES = (
    Axis("samples", _counted("trajectories_trained")),
    Axis("sampled tokens", _summed("tokens_sampled")),
    Axis("seconds of training", _summed("seconds/step")),
)
STEPS = Axis("learner steps", lambda run: RunExtent([0, run.summary.steps], [0, run.summary.steps]))
TABLED = (Measure("held-out accuracy", "eval/accuracy", True), Measure("reward", "reward/mean"))
MEASURES = (*TABLED, Measure("held-out outcome", "eval/outcome", True), Measure("outcome", "outcome/mean"))
"""The measures with curves. Only some have tables."""
SPEED = {
    "seconds": "seconds of the actors",
    "tokens_per_s": "sampled tokens/s",
    "max_lag": "largest lag",
    "learner_idle": "learner idle",
    "engine_idle": "engine idle",
    "waited_for_labels": "waited for labels",
}
OLD_GROUPS = {
    "tokens_evicted": "tokens thrown away as too old",
    "tokens_masked": "tokens masked as too old",
    "waited_s": "seconds of waits for old groups",
    "wait_limits": "waits for old groups that reached their limit",
}
"""Results that are left out if they are 0 in all compared runs: in some runs no group becomes too old."""


@dataclass(frozen=True, slots=True)
class MatchedTable:
    """A measure of all runs at the same points. `values[run][part]` is the value of a run at the point `at[part]`, or
    None if it is unknown."""

    measure: str
    axis: str
    at: Sequence[float]
    values: Sequence[Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of runs. Each mapping has a list for each name, with one value for each run.

    - `configuration`: the keys whose values differ;
    - `environment`: the versions and hardware that differ;
    - `results`: all results;
    - `configurations`: a number for each run. Different configurations are numbered from 0, and runs that differ only
      in their seed have the same number;
    - `statement`: the conclusion that the runs allow.
    """

    names: Sequence[str]
    runs: Sequence[ReportedRun]
    configuration: Mapping[str, Sequence[Any]]
    environment: Mapping[str, Sequence[str]]
    results: Mapping[str, Sequence[Any]]
    tables: Sequence[MatchedTable]
    configurations: Sequence[int]
    statement: str


def compare(runs: Sequence[ReportedRun]) -> Comparison:
    """Compare runs. Raises ConfigError: they cannot be compared."""
    _check(runs)
    kinds: dict[str, int] = {}
    configurations = [kinds.setdefault(repr(_kind(run)), len(kinds)) for run in runs]
    return Comparison(
        names=_names(runs),
        runs=runs,
        configuration=_differing([_shown(run) for run in runs]),
        environment=_differing([_facts(run.environments[0] if run.environments else None) for run in runs]),
        results=_all_results(runs),
        tables=[table for axis in AXES for measure in TABLED if (table := _matched(runs, measure, axis))],
        configurations=configurations,
        statement=_statement(configurations, runs),
    )


def _check(runs: Sequence[ReportedRun]) -> None:
    folders = [run.folder.resolve() for run in runs]
    if len(runs) < 2:
        raise ConfigError("name at least two runs to compare")
    for at, run in enumerate(runs):
        if folders[at] in folders[:at]:
            raise ConfigError(f"{run.folder} is named twice")
        if not run.steps:
            raise ConfigError(
                f"{run.folder} has no trained step in its metrics, so there is nothing to compare: see its logs, or "
                "leave it out"
            )


def _names(runs: Sequence[ReportedRun]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _compared(run: ReportedRun) -> dict[str, Any]:
    return {
        key: value for key, value in run.values.items() if key not in NOT_COMPARED and not key.startswith(NO_ADDRESS)
    }


def _shown(run: ReportedRun) -> dict[str, Any]:
    """The compared values. A value that changed in mid-run is a text with its steps."""
    changed = {each.key for each in run.changes}
    return {key: run.text_of(key) if key in changed else value for key, value in _compared(run).items()}


def _kind(run: ReportedRun) -> dict[str, Any]:
    return {key: value for key, value in _shown(run).items() if key != SEED}


def _differing(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of all runs by name, for names whose values differ. A run without any value is not compared."""
    known = [column for column in columns if column]
    rows = _side_by_side(columns)
    return {
        name: values for name, values in rows.items() if any(each.get(name) != known[0].get(name) for each in known)
    }


def _side_by_side(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name) for column in columns] for name in names}


def _facts(host: Environment | None) -> dict[str, str]:
    if host is None:
        return {}
    facts = {
        "host": host.host,
        "GPUs": "; ".join(host.gpus) or "none",
        "GPU driver": host.driver or "none",
        "CPU": f"{host.cpu}, {host.cores} cores",
        "system": host.system,
        "asyncrl": host.asyncrl,
        "commit": host.commit or "unknown",
        "Python": host.python,
    }
    return facts | dict(host.packages or {})


def _all_results(runs: Sequence[ReportedRun]) -> dict[str, list[Any]]:
    found = _side_by_side([_results(run) for run in runs])
    return {name: values for name, values in found.items() if name not in OLD_GROUPS.values() or any(values)}


def _results(run: ReportedRun) -> dict[str, Any]:
    summary = run.summary
    changes = {"reward": summary.reward, "outcome": summary.outcome} | {
        f"held-out {name}": change for name, change in summary.held_out.items()
    }
    found: dict[str, Any] = {"result": run.state, "steps": summary.steps}
    for name, change in changes.items():
        if change is not None:
            found |= {f"{name}, first": change.first, f"{name}, last": change.last}
    for axis in AXES:
        progress = axis.of(run)
        if progress is not None:
            found[axis.name] = progress.at[-1]
    found |= {SPEED.get(name, name): value for name, value in summary.speed.items()}
    found |= {shown: summary.old_groups[name] for name, shown in OLD_GROUPS.items()}
    return found | {f"trajectories {end}": count for end, count in summary.trajectories.items() if end != "trained"}


def _matched(runs: Sequence[ReportedRun], measure: Measure, axis: Axis) -> MatchedTable | None:
    progress = [axis.of(run) for run in runs]
    known = [each for each in progress if each is not None]
    if len(known) < len(runs) or not any(measure.points(run) for run in runs):
        return None
    shortest = min(each.at[-1] for each in known)
    at = [shortest * part / PARTS for part in range(1, PARTS + 1)]
    return MatchedTable(
        measure.title,
        axis.name,
        at,
        [[_value(run, measure, each, point, shortest) for point in at] for run, each in zip(runs, known, strict=True)],
    )


def _value(run: ReportedRun, measure: Measure, progress: RunExtent, point: float, shortest: float) -> float | None:
    """The newest held-out value up to a point, or the mean of the batches shortly before it."""
    points = [(progress.after(steps), value) for steps, value in measure.points(run)]
    # Sums of floats may end a little beyond the point.
    before = [(x, value) for x, value in points if x <= point * (1 + 1e-9)]
    if measure.is_held_out or not before:
        return before[-1][1] if before else None
    recent = [value for x, value in before if x > point - WINDOW * shortest]
    return fmean(recent or [before[-1][1]])


def _statement(configurations: Sequence[int], runs: Sequence[ReportedRun]) -> str:
    counts = [configurations.count(kind) for kind in range(max(configurations) + 1)]
    seeds = {run.values[SEED] for run in runs}
    if len(counts) == 1:
        by = f"their seeds ({len(seeds)} different ones)" if len(seeds) > 1 else "neither configuration nor seed"
        return f"{len(runs)} runs of one configuration, which differ in {by}: their spread is due to chance."
    if max(counts) == 1:
        return (
            f"{len(runs)} runs of different configurations, with one seed each. Differences may be chance: no "
            f"configuration is shown to be better. To find out, train each with several values of {SEED}."
        )
    runs_each = ", ".join(map(str, counts))
    return (
        f"{len(runs)} runs of {len(counts)} configurations ({runs_each} runs each). Compare the differences between "
        "configurations with the spread within one. No statistical test was made."
    )


def axis_points(run: ReportedRun, measure: Measure, axis: Axis) -> list[tuple[float, float]]:
    """The curve of a measure over an axis; empty if the run lacks a metric for it."""
    progress = axis.of(run)
    return [] if progress is None else [(progress.after(steps), value) for steps, value in measure.points(run)]


def axis_marks(name: str, run: ReportedRun, axis: Axis) -> list[tuple[float, str]]:
    """The places of a run's changes on an axis, and their texts. `name` names the run."""
    progress = axis.of(run)
    return [] if progress is None else [(progress.after(step), f"{name} {text}") for step, text in run.marks()]


def spread(comparison: Comparison, name: str) -> list[tuple[int, int, float, float, float]]:
    """The spread of a result in each configuration that has several runs: the configuration's number, the number of
    runs with this result, and their least, mean and greatest value."""
    found = []
    for kind in range(max(comparison.configurations) + 1):
        pairs = zip(comparison.configurations, comparison.results.get(name, []), strict=False)
        values = [value for of, value in pairs if of == kind and value is not None]
        if len(values) > 1:
            found.append((kind, len(values), min(values), fmean(values), max(values)))
    return found
