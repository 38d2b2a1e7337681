"""Shows how much finished runs learned, over trained samples and over seconds. It runs nothing itself.

    python -m benchmarks.learning_curves gsm8k runs/lag0_seed0 runs/lag4_seed0 runs/lag4_seed1 --picture curves.png
    python -m benchmarks.learning_curves gsm8k runs/lag4_seed0 --evaluations runs/evaluations/*/evaluation.json

The result is benchmarks/results/learning-NAME.json: the evaluations of each run, with its seed and `replay.max_lag`,
and the results of `asyncrl evaluate` in the named files. The picture has a line for each setting, which is the mean
over its seeds, and their spread.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from asyncrl.errors import AsyncrlError, DataError
from asyncrl.runs.elapsed import elapsed_s
from asyncrl.runs.finding import require_run
from asyncrl.runs.run import Run
from benchmarks.record import RESULTS, machine, write_result

Row = dict[str, Any]

OVER = {"samples": "trained trajectories", "seconds": "seconds of steps"}
"""The x axes of the picture: the column of a point, and its meaning."""
COLUMNS = ("setting", "seeds", "first", "last, mean", "last, least to greatest", "samples/s", "tokens/s", "seconds")
ALIKE = ("batch_size", "group_size", "lr")
"""The options of the learner in which the seeds of a setting must not differ."""
EVALUATED = ("tasks", "scored", "failed", "accuracy", "mean_length", "pass_at")
"""The values of `asyncrl evaluate` over all tasks that are kept."""


def curve(run: Run) -> Row:
    """The points of a run: a row for each evaluation, with the training before it.

    `seconds` is the time of the learner's steps. Starts and pauses of the run do not count, nor does the evaluation
    before the first step. `tokens` are the sampled tokens of trained trajectories, while `tokens_sampled` of the run
    counts all that actors sampled. `reward` is the mean over the steps since the previous point. Raises DataError: the
    run has no evaluations, or has trained no step.
    """
    values = run.real_values()
    steps = {int(row["step"]): row for row in run.rows("learner") if "reward/mean" in row}
    evaluations = [row for row in run.rows("evaluation") if "eval/accuracy" in row]
    if not steps or not evaluations:
        raise DataError(
            f"{run.folder} has {len(steps)} steps of RL and {len(evaluations)} evaluations; it needs both: set "
            "data.eval and learner.eval_every"
        )
    points: list[Row] = []
    for row in sorted(evaluations, key=lambda each: int(each["step"])):
        before = [steps[step] for step in sorted(steps) if step < row["step"]]
        since = [each for each in before if not points or each["step"] >= points[-1]["step"]]
        points.append(
            {
                "step": int(row["step"]),
                "samples": int(before[-1]["trajectories_trained"]) if before else 0,
                "tokens": int(sum(each["tokens_sampled"] for each in before)),
                "seconds": round(sum(each["seconds/step"] for each in before), 2),
                "accuracy": row["eval/accuracy"],
                "reward": round(fmean(each["reward/mean"] for each in since), 4) if since else None,
                "episodes": int(row.get("eval/count", 0)),
            }
        )
    return {
        "run": run.name,
        "setting": setting_of(values),
        "max_lag": values["replay.max_lag"],
        "seed": values["run.seed"],
        "batch_size": values["learner.batch_size"],
        "group_size": values["learner.group_size"],
        "lr": values["learner.lr"],
        "end": run.end(),
        "elapsed_s": round(elapsed_s(run), 1),
        "tokens_sampled": round(sum(_grown(row.get("tokens", 0.0) for row in run.rows(role)) for role in _actors(run))),
        "points": points,
    }


def setting_of(values: Mapping[str, Any]) -> str:
    """The setting of a run in words. Runs with the same setting differ in their seeds."""
    return f"max_lag {values['replay.max_lag']}{', colocated' if values['cluster.colocated'] else ''}"


def check_alike(curves: Iterable[Row]) -> None:
    """Raises DataError: runs that would be averaged as seeds of one setting have other learning rates or batches."""
    for setting, runs in by_setting(curves).items():
        first, *others = runs
        for other in others:
            differ = [f"learner.{key} {first[key]} and {other[key]}" for key in ALIKE if first[key] != other[key]]
            if differ:
                raise DataError(
                    f"{first['run']} and {other['run']} are no two seeds of {setting}: they have {', '.join(differ)}; "
                    "name them in two calls"
                )


def _actors(run: Run) -> list[str]:
    return run.roles("actor-*")


def _grown(counter: Iterable[float]) -> float:
    """The growth of a counter from 0. A process that restarts counts from 0 again."""
    values = [0.0, *counter]
    return sum(after - before if after >= before else after for before, after in pairwise(values))


def evaluation(path: Path) -> Row:
    """The result of `asyncrl evaluate` in a file. Raises DataError: the file has none."""
    try:
        found = json.loads(path.read_text())
        total = found["total"]
        of = {name: found.get(name) for name in ("run", "model", "step", "data", "attempts", "temperature")}
        return {**{name: value for name, value in of.items() if value is not None}, **{k: total[k] for k in EVALUATED}}
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: `asyncrl evaluate` did not write it: name its evaluation.json") from error


def by_setting(curves: Iterable[Row]) -> dict[str, list[Row]]:
    """The runs of each setting. The settings are sorted by `max_lag`."""
    found: dict[str, list[Row]] = defaultdict(list)
    for each in sorted(curves, key=lambda each: (each["max_lag"], each["setting"], each["seed"])):
        found[each["setting"]].append(each)
    return dict(found)


def table(curves: Iterable[Row]) -> str:
    """A line of Markdown for each setting."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(_cells(name, runs) for name, runs in by_setting(curves).items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(setting: str, runs: Sequence[Row]) -> tuple[str, ...]:
    firsts, lasts = ([run["points"][place]["accuracy"] for run in runs] for place in (0, -1))
    ends = [run["points"][-1] for run in runs]
    seconds = sum(end["seconds"] for end in ends)
    return (
        setting,
        ", ".join(str(run["seed"]) for run in runs),
        f"{fmean(firsts):.3f}",
        f"{fmean(lasts):.3f}",
        f"{min(lasts):.3f} to {max(lasts):.3f}",
        *(f"{sum(end[name] for end in ends) / seconds:,.1f}" if seconds else "-" for name in ("samples", "tokens")),
        f"{seconds / len(runs):,.0f}",
    )


def line(runs: Sequence[Row], over: str) -> Iterator[tuple[float, float, float, float]]:
    """Yield x, and the mean, the least and the greatest accuracy, at each step at which more than half of the `runs`
    have a point. x is the mean of these runs. The line ends where x would fall, since a slow run has no
    more points."""
    reached = 0.0
    by_step = [{point["step"]: point for point in run["points"]} for run in runs]
    for step in sorted(set().union(*by_step)):
        points = [points[step] for points in by_step if step in points]
        if len(points) * 2 <= len(runs):
            continue
        x = fmean(point[over] for point in points)
        if x < reached:
            return
        reached = x
        accuracies = [point["accuracy"] for point in points]
        yield x, fmean(accuracies), min(accuracies), max(accuracies)


def draw(curves: Iterable[Row], path: Path) -> None:
    """Draw the accuracy over samples and over seconds: a line for each setting, and the spread of its seeds."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(OVER), figsize=(10, 3.8), sharey=True, layout="constrained")
    for axes, (over, label) in zip(panels, OVER.items(), strict=True):
        for number, (setting, runs) in enumerate(by_setting(curves).items()):
            xs, means, least, greatest = zip(*line(runs, over), strict=True)
            seeds = f", {len(runs)} seeds" if len(runs) > 1 else ""
            axes.plot(xs, means, "o-", markersize=3, color=f"C{number}", label=f"{setting}{seeds}")
            axes.fill_between(xs, least, greatest, color=f"C{number}", alpha=0.2, linewidth=0)
        axes.set(xlabel=label, ylim=(0, None), xlim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out accuracy, greedy")
    panels[-1].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def described(run: Run) -> str:
    """The machine of a run: its processor, cores and GPUs. This machine if the run did not record its own."""
    found = run.environments()
    if not found:
        return machine()
    gpus = list(found[0].gpus)
    names = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([*names, found[0].cpu, f"{found[0].cores} cores", f"Python {found[0].python}"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of the result")
    parser.add_argument("runs", nargs="+", help="folders or names of runs of asyncrl train")
    parser.add_argument("--evaluations", type=Path, nargs="+", default=[], help="files evaluation.json to add")
    parser.add_argument("--picture", type=Path, help="PNG file to write")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result; default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        runs = [require_run(name) for name in options.runs]
        curves = [curve(run) for run in runs]
        check_alike(curves)
        evaluations = [evaluation(path) for path in options.evaluations]
    except AsyncrlError as error:
        sys.exit(str(error))
    result = {"runs": curves, "evaluations": evaluations}
    print(table(curves))
    print(f"written to {write_result(f'learning-{options.name}', result, described(runs[0]), options.out)}")
    if options.picture:
        draw(curves, options.picture)


if __name__ == "__main__":
    main()
