"""The demo's additions to the summary of its run: an audit of the trajectories, and a picture of the curves."""

from __future__ import annotations

from pathlib import Path

from asyncrl.runs.run import Run


def audit(run_dir: Path, max_times_sampled: int) -> dict[str, int]:
    """Count the lost trajectories, and the trajectories that were trained more than `max_times_sampled` times."""
    with Run(run_dir).stored() as stored:
        found = stored.audit(max_times_sampled)
    return {name: found[name] for name in ("lost", "trained_twice")}


def draw(run_dir: Path, picture: Path) -> None:
    """Draw accuracy, lag and idle shares over time as a PNG."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    run = Run(run_dir)
    steps, evaluations = (list(run.rows(role)) for role in ("learner", "evaluation"))
    actors = [list(run.rows(role)) for role in run.roles("actor-*")]
    start = min(lines[0]["time"] for lines in [steps, *actors] if lines)
    steps = [line for line in steps if "reward/mean" in line]
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
