"""The summary of a run from its metrics and its store: figures for programs, a table and a picture for people."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.table import Table

from asyncrl.config.schema import TrainConfig
from asyncrl.observe.sinks import read_lines
from asyncrl.replay.stored import StoredRun

Lines = list[dict[str, Any]]

_ENGINE = ("tokens", "seconds", "idle_seconds")
_WAITED = "learner_waited_for_labels_s"
_SHARES = ("accuracy", "learner_idle", "rollout_idle", "waited_for_labels")


def summarise(config: TrainConfig, run_dir: Path, seconds: float) -> dict[str, Any]:
    """The figures of a finished run; `seconds` is how long its loop took."""
    learner = read_lines(run_dir / "metrics" / "learner.jsonl")
    steps = _newest(learner, "reward/mean")
    accuracies = [line["eval/accuracy"] for line in _newest(learner, "eval/accuracy")]
    with closing(StoredRun(run_dir / "replay")) as stored:
        counts, audit = stored.counters(), stored.audit(config.replay.sampler.max_times_sampled)
    actors = [_totals(lines, _ENGINE) for lines in _lines_of(run_dir, "actor-*")]
    waited = [_totals(lines, [_WAITED])[_WAITED] for lines in _lines_of(run_dir, "replay*")]
    engine_seconds = sum(actor["seconds"] for actor in actors)
    step_seconds = sum(line["seconds/step"] for line in steps)
    return {
        "accuracy_before": accuracies[0] if accuracies else None,
        "accuracy_after": accuracies[-1] if accuracies else None,
        "steps": len(steps),
        "trajectories_trained": counts["trained"],
        "evicted": counts["evicted"],
        "lost": audit["lost"],
        "trained_twice": audit["trained_twice"],
        "max_lag_seen": int(max(line["lag/max"] for line in steps)),
        "tokens_per_s": round(sum(actor["tokens"] for actor in actors) / seconds, 1),
        "learner_idle": round(sum(line["idle"] * line["seconds/step"] for line in steps) / step_seconds, 4),
        "rollout_idle": round(sum(actor["idle_seconds"] for actor in actors) / engine_seconds, 4),
        "waited_for_labels": round(max(waited, default=0.0) / seconds, 4),
        "seconds": round(seconds, 1),
    }


def _newest(learner: Lines, name: str) -> Lines:
    """The newest line with a value of that name of each step: a step that was trained again after a crash has two."""
    newest = {line["step"]: line for line in learner if name in line}
    return [newest[step] for step in sorted(newest)]


def _lines_of(run_dir: Path, roles: str) -> list[Lines]:
    return [read_lines(path) for path in sorted((run_dir / "metrics").glob(f"{roles}.jsonl"))]


def _totals(lines: Lines, names: Sequence[str]) -> dict[str, float]:
    """A role's counters over all of its starts: they begin at 0 each time."""
    totals = dict.fromkeys(names, 0.0)
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        for name in names:
            if following is None or following[name] < line[name]:
                totals[name] += line[name]
    return totals


def table(summary: dict[str, Any]) -> Table:
    """The summary for people, without the figures that the run did not measure."""
    rendered = Table(title="what happened", show_header=False)
    for name, value in summary.items():
        if value is not None:
            rendered.add_row(name.replace("_", " "), f"{value:.1%}" if name.startswith(_SHARES) else str(value))
    return rendered


def draw(run_dir: Path, picture: Path) -> None:
    """Accuracy and reward, lag, and idle shares over time, as a PNG."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    learner = read_lines(run_dir / "metrics" / "learner.jsonl")
    actors = _lines_of(run_dir, "actor-*")
    start = min(lines[0]["time"] for lines in [learner, *actors] if lines)
    steps, evaluations = _newest(learner, "reward/mean"), _newest(learner, "eval/accuracy")
    minutes = [(line["time"] - start) / 60 for line in steps]
    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    top.plot(minutes, [line["outcome/mean"] for line in steps], color="0.6", label="outcome of the trained batch")
    at = [(line["time"] - start) / 60 for line in evaluations]
    top.plot(at, [line["eval/accuracy"] for line in evaluations], "o-", label="held-out accuracy, greedy")
    top.set(ylabel="share right", ylim=(0, 1.02), title=f"run {run_dir.name}")
    middle.plot(minutes, [line["lag/max"] for line in steps], drawstyle="steps-mid", label="largest lag in the batch")
    middle.plot(minutes, [line["lag/mean"] for line in steps], label="mean lag")
    middle.set(ylabel="versions", ylim=(0, None))
    bottom.plot(minutes, [line["idle"] for line in steps], label="learner idle")
    for index, lines in enumerate(actors):
        shares = [(line["time"], line["idle"]) for line in lines if "idle" in line]
        bottom.plot([(t - start) / 60 for t, _ in shares], [share for _, share in shares], label=f"engine {index} idle")
    bottom.set(ylabel="share of time", ylim=(0, 1.02), xlabel="minutes")
    for axes in (top, middle, bottom):
        axes.legend(loc="best", fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
