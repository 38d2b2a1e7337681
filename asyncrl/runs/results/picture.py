"""A picture of a training for its model card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.observe.lines import Row


def draw_training(steps: Sequence[Row], evaluations: Sequence[Row], picture: Path) -> None:
    """Outcome of the training batches and held-out accuracy above, reward below, by learner step, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True)
    at = [row["step"] + 1 for row in steps]
    top.plot(at, [row.get("outcome/mean") for row in steps], color="0.6", label="outcome of the training batch")
    top.plot(
        [row["step"] for row in evaluations],
        [row.get("eval/accuracy") for row in evaluations],
        "o-",
        label="accuracy on held-out tasks",
    )
    bottom.plot(at, [row.get("reward/mean") for row in steps], color="C2", label="reward of the training batch")
    bottom.set(xlabel="learner step")
    for axes in (top, bottom):
        axes.legend(loc="best", fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120)
