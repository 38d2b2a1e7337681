"""The figures of a run from its metrics: a row for each evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.locations import SUMMARY_FILE
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines

Row = dict[str, Any]

DONE, FAILED = "done", "failed"
FALL = 0.1
"""The least fall of the accuracy in a collapse. Smaller falls of a policy that never learnt are chance."""

_MEANS = {
    "entropy": "entropy",
    "ess": "mismatch/ess",
    "k3": "mismatch/k3",
    "masked": "masked/any",
    "reward": "reward/mean",
    "lag_mean": "lag/mean",
    "token_lag_mean": "token_lag/mean",
}
"""Columns that are means over the learner steps since the previous evaluation, by the learner's metrics."""

_COUNTERS = ("evicted", "filtered", "dropped", "dead")
_SCORER = "scoring-0"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of `asyncrl train`: its status, its last output if it failed, its seconds, and the processor seconds of
    it and its roles, if known. After a resume, both times are of the last start."""

    status: int
    words: str
    seconds: float
    processor_seconds: float | None


def rows_of_run(folder: Path, ending: Ending) -> list[Row]:
    """The rows of an ended run. A run that failed before its first evaluation has a row without figures.

    `seconds` is the time of the learner's steps until the evaluation, without the start of the processes.
    """
    evaluations = read_lines(metrics_file(folder, "evaluation"))
    steps = [line for line in read_lines(metrics_file(folder, "learner")) if "reward/mean" in line]
    replays = read_lines(metrics_file(folder, "replay"))
    scorers = read_lines(metrics_file(folder, _SCORER))
    rows = []
    last, last_time = 0, 0.0
    for line in evaluations:
        step = int(line["step"])
        since = [each for each in steps if last <= each["step"] < step]
        rows.append(
            {
                "step": step,
                "accuracy": line.get("eval/accuracy"),
                "samples": max((int(each["trajectories_trained"]) for each in steps if each["step"] < step), default=0),
                "seconds": sum(each["seconds/step"] for each in steps if each["step"] < step),
                "lag_max": max((each["lag/max"] for each in since), default=None),
                "idle": _mean(since, "idle"),
                **{column: _mean(since, metric) for column, metric in _MEANS.items()},
                **_counters(replays, line["time"]),
                **_guards(scorers, last_time, line["time"]),
            }
        )
        last, last_time = step, line["time"]
    status, reason = _came_of(folder, ending)
    rows = rows or [{"step": None}]
    rows[-1] |= _by_end(folder)
    took = {"run_seconds": ending.seconds, "processor_seconds": ending.processor_seconds}
    return [{**row, "status": status, "reason": reason, **took} for row in rows]


def mean_accuracy(rows: Sequence[Row]) -> float | None:
    """The mean accuracy over a run's evaluations, which are evenly spaced; None for a failed run."""
    accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    if not accuracies or rows[-1]["status"] == FAILED:
        return None
    return float(sum(accuracies) / len(accuracies))


def collapsed(accuracies: Sequence[float | None]) -> bool:
    """True if the last accuracy is at most half of the best accuracy, and at least FALL below it."""
    known = [each for each in accuracies if each is not None]
    return bool(known) and max(known) - known[-1] >= max(FALL, max(known) / 2)


def _came_of(folder: Path, ending: Ending) -> tuple[str, str]:
    if ending.status == 0:
        return DONE, ""
    return FAILED, str(_summary(folder).get("reason") or ending.words or f"exit status {ending.status}")


def _by_end(folder: Path) -> Row:
    """The counts and mean lengths at the end, since the replay's last metrics may be older."""
    summary = _summary(folder)
    counts, decided = summary.get("trajectories", {}), summary.get("decided", {})
    ends = {name: float(counts[name]) for name in _COUNTERS if name in counts}
    means = {f"length_{end}": decided[end]["length"] for end in ("sampled", "trained", "evicted") if end in decided}
    return ends | means


def _counters(replays: Sequence[Mapping[str, Any]], time: float) -> Row:
    newest: Mapping[str, Any] = next((line for line in reversed(replays) if line["time"] <= time), {})
    return {name: float(newest.get(name, 0)) for name in _COUNTERS}


def _guards(scorers: Sequence[Mapping[str, Any]], after: float, until: float) -> Row:
    """The share of agreements of process model and rules between two times, and the alarms so far; None without a
    process model."""
    compared = [line for line in scorers if "prm_agreement" in line and line["time"] <= until]
    between = [line for line in compared if line["time"] > after]
    alarms = compared[-1]["hack_alarms"] if compared else None
    return {"agreement": _mean(between, "prm_agreement"), "hack_alarms": alarms}


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY_FILE
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _mean(lines: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    values = [line[metric] for line in lines if metric in line]
    return sum(values) / len(values) if values else None
