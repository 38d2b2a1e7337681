"""Makes the plots in the report of a run from its metrics. A plot without values is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.runs.failures import shown_end
from asyncrl.runs.lines import Row
from asyncrl.runs.report.reported import ReportedRun
from asyncrl.runs.report.svg import Plot, Series

STEP = "learner step"
MOST_ROLES = 4
"""The maximum number of actors or scorers in a plot. If there are more, it shows evenly chosen ones."""


@dataclass(frozen=True, slots=True)
class StepPlot:
    """A plot of the learner's metrics by step: its title and its metrics with their labels."""

    title: str
    metrics: Mapping[str, str]
    unit: str = ""
    is_share: bool = False
    is_stacked: bool = False


LEARNING = (
    StepPlot(
        "Reward of the training batches",
        {"reward/mean": "mean", "reward/max": "highest", "reward/min": "lowest", "outcome/mean": "mean outcome"},
    ),
    StepPlot("Entropy of the policy", {"entropy": "entropy"}, "nats"),
    StepPlot(
        "KL",
        {"kl_reference": "to the reference", "update/kl": "of the update", "mismatch/kl": "behaviour to proximal"},
        "nats",
    ),
    StepPlot("Gradient norm", {"grad_norm": "policy", "value/grad_norm": "critic", "implicit/grad_norm": "implicit"}),
    StepPlot("Groups without a difference", {"groups/zero_variance": "equal rewards"}, "share of groups", True),
)
DATA = (
    StepPlot("Lag of the trained episodes", {"lag/max": "largest", "lag/mean": "mean"}, "versions"),
    StepPlot("Mismatch of engine and learner", {"mismatch/kl": "KL", "mismatch/k3": "KL (k3)"}, "nats"),
    StepPlot(
        "Importance weights",
        {"mismatch/ess": "effective sample size", "mismatch/agree": "tokens that agree"},
        "share",
        True,
    ),
    StepPlot(
        "Clipped and left out",
        {"clip/high": "above the bound", "clip/low": "below the bound", "masked/any": "left out"},
        "share of tokens",
    ),
    StepPlot("Length of the trained episodes", {"length/max": "longest", "length/mean": "mean"}, "sampled tokens"),
)
PHASES = ("wait", "fetch", "release", "onload", "proximal", "train", "publish", "checkpoint", "offload")
SPEED = (
    StepPlot("Seconds of a step", {f"seconds/{name}": name for name in PHASES}, "s", is_stacked=True),
    StepPlot("Model FLOPs utilisation", {"mfu/train": "in training", "mfu/step": "in the whole step"}, "share", True),
    StepPlot("Peak memory of the learner", {"memory/peak_gb": "peak"}, "GB"),
)
FLOWS = ("accepted", "labelled", "trained", "evicted", "filtered", "dropped", "dead")
DEPTHS = {"depth_pending": "wait for an actor", "depth_waiting": "wait for a scorer", "depth_ready": "ready groups"}


def learning_plots(run: ReportedRun) -> Iterator[Plot]:
    """The plots that show if the run learns."""
    reward, *others = LEARNING
    yield _by_step(run, reward)
    measured = {"eval/accuracy": "accuracy", "eval/outcome": "outcome", "eval/reward": "reward"}
    estimates = {name: name.removeprefix("eval/") for row in run.evaluations[-1:] for name in row if "/pass@" in name}
    whole = {name: label for name, label in (measured | estimates).items() if name.count("/") == 1}
    held_out = [_series(run.evaluations, name, label, 0, True) for name, label in whole.items()]
    yield Plot("Held-out tasks", STEP, held_out, marks=run.marks())
    yield from (_by_step(run, plot) for plot in others)


def data_plots(run: ReportedRun) -> Iterator[Plot]:
    """The plots of the age of the data, and of its fit to the policy."""
    yield from (_by_step(run, plot) for plot in DATA)
    scorers = _roles(run, "scoring")
    agreement = "prm_agreement"
    yield Plot(
        "Process scores agree with the rules",
        _minutes(run),
        [_by_time(run, rows, agreement, name) for name, rows in scorers.items()],
        "share of episodes",
        is_share=True,
    )


def speed_plots(run: ReportedRun) -> Iterator[Plot]:
    """The plots of the time that each part takes."""
    engines, scorers = _roles(run, "actor"), _roles(run, "scoring")
    idle = [_by_time(run, run.steps, "idle", "learner")]
    idle += [_by_time(run, rows, "idle", name) for name, rows in (engines | scorers).items()]
    yield Plot("Idle", _minutes(run), idle, "share of time", is_share=True)
    yield from (_by_step(run, plot) for plot in SPEED)
    rates = [_by_time(run, run.steps, "tokens_per_s", "learner")]
    rates += [_by_time(run, rows, "tokens_per_s", name) for name, rows in engines.items()]
    yield Plot("Speed", _minutes(run), rates, "tokens/s")
    replays = {name: rows for name, rows in run.roles.items() if name.startswith("replay")}
    for name, rows in list(replays.items())[:MOST_ROLES]:
        of = "" if len(replays) == 1 else f" of {name}"
        flows = [_by_time(run, rows, flow, shown_end(flow)) for flow in FLOWS if any(row.get(flow) for row in rows)]
        yield Plot(f"Episodes{of} since the start", _minutes(run), flows, "episodes")
        depths = [_by_time(run, rows, depth, label) for depth, label in DEPTHS.items()]
        yield Plot(f"Queues{of}", _minutes(run), depths, "waiting now")


def _by_step(run: ReportedRun, plot: StepPlot) -> Plot:
    series = [_series(run.steps, name, label, 1) for name, label in plot.metrics.items()]
    if plot.is_stacked:
        series = [each for each in series if any(each.ys)]
    return Plot(plot.title, STEP, series, plot.unit, plot.is_share, plot.is_stacked, marks=run.marks())


def _series(rows: Sequence[Row], name: str, label: str, first: int, has_dots: bool = False) -> Series:
    """A metric by step. `first` is added to the step of each row: 1 for the learner, whose rows count steps from 0."""
    return Series(label, [row["step"] + first for row in rows], [row.get(name) for row in rows], has_dots)


def _by_time(run: ReportedRun, rows: Sequence[Row], name: str, label: str) -> Series:
    scale = 3600 if _minutes(run) == "hours" else 60
    return Series(label, [(row["time"] - run.start()) / scale for row in rows], [row.get(name) for row in rows])


def _minutes(run: ReportedRun) -> str:
    last = max((rows[-1]["time"] for rows in (run.steps, *run.roles.values()) if rows), default=0.0)
    return "hours" if last - run.start() > 3 * 3600 else "minutes"


def _roles(run: ReportedRun, kind: str) -> dict[str, Sequence[Row]]:
    """The rows of the processes of a kind by name. Of many processes, it has at most MOST_ROLES, evenly spread."""
    found = {name: rows for name, rows in run.roles.items() if name.startswith(f"{kind}-") and rows}
    if len(found) <= MOST_ROLES:
        return found
    chosen = list(found)[:: -(-len(found) // MOST_ROLES)]
    return {name: found[name] for name in chosen}
