"""The picture of a study: accuracy over samples or seconds, or one figure of the cells over another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.studies.figures import FAILED, Row
from benchmarks.studies.study import Study
from benchmarks.studies.summary import Cell, Spread, cell_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Key = tuple[str, ...]
"""The names of a cell's levels, with or without its panel's level."""
Curves = Mapping[Key, Sequence[Sequence[Row]]]
"""The rows of each run of a cell."""

COMPARED: Mapping[str, Callable[[Cell], Spread | None]] = {
    "learner idle": lambda cell: cell.idle,
    "evicted": lambda cell: cell.evicted_share,
    "last accuracy": lambda cell: cell.last,
    "agreement, change": lambda cell: cell.agreement_change,
}
"""The figures that a study may compare in a picture."""


def draw(study: Study, curves: Curves, picture: Path) -> str:
    """Write the picture as a PNG: a panel for each level of `study.panels`. Returns a description."""
    if study.compared is None:
        _draw_curves(study, curves, picture)
        return "Thick lines are means of the seeds that did not fail, thin lines single seeds."
    _draw_compared(study, study.compared, curves, picture)
    return "Large dots are medians over the seeds, small dots single seeds."


def title(study: Study) -> str:
    """The alternative text of the picture."""
    return f"accuracy over {study.over}" if study.compared is None else "{1} against {0}".format(*study.compared)


def _draw_curves(study: Study, curves: Curves, picture: Path) -> None:
    """A line for each cell, and thin lines for its seeds."""
    labels = {"samples": "trained trajectories", "seconds": "seconds of steps"}[study.over], "held-out accuracy, greedy"
    highest = max((row["accuracy"] or 0 for runs in curves.values() for rows in runs for row in rows), default=0)
    with _panels(study, curves, labels, picture) as panels:
        for key, runs in curves.items():
            axes, colour = panels[key]
            _draw_cell(axes, study.over, runs, colour)
            axes.set_ylim(0, 1.05 * highest or 1)


def _draw_compared(study: Study, names: tuple[str, str], curves: Curves, picture: Path) -> None:
    """A small dot for each run that has both figures, and a large dot for the medians of its cell."""
    with _panels(study, curves, names, picture) as panels:
        for key, runs in curves.items():
            axes, colour = panels[key]
            for of, size in (*(([run], 3) for run in runs), (runs, 8)):
                cell = cell_of(dict(zip(study.factors, key, strict=True)), 0.0, of, study.target)
                x, y = (COMPARED[name](cell) for name in names)
                if x is not None and y is not None:
                    axes.plot(x.median, y.median, "o", color=colour, markersize=size, alpha=0.8)


@contextmanager
def _panels(
    study: Study, keys: Iterable[Key], labels: tuple[str, str], picture: Path
) -> Iterator[dict[Key, tuple[Axes, Any]]]:
    """Yield the panel and the colour of each cell, then write the picture with a legend of the colours."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    place = list(study.factors).index(study.panels)
    keys = list(keys)
    panels = sorted({key[place] for key in keys}, key=list(study.factors[study.panels]).index)
    others = {key: key[:place] + key[place + 1 :] for key in keys}
    shown = list(dict.fromkeys(others.values()))
    width = min(4, len(panels))
    height = -(-len(panels) // width)
    # The legend is right of the panels, and may be higher.
    size = (4 * width, max(3 * height, 0.25 * len(shown) + 1))
    figure, grid = plt.subplots(
        height, width, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    colours = {key: plt.get_cmap("turbo")((index + 0.5) / len(shown)) for index, key in enumerate(shown)}
    places = dict(zip(panels, grid.flat, strict=False))
    yield {key: (places[key[place]], colours[others[key]]) for key in keys}
    for panel, axes in places.items():
        axes.set_title(f"{study.panels} {panel}")
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(panels) - width : len(panels)]:
        axes.tick_params(labelbottom=True)  # The row below may be shorter.
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    lines = [Line2D([], [], color=colour, label=", ".join(key)) for key, colour in colours.items()]
    factors = ", ".join(factor for factor in study.factors if factor != study.panels)
    figure.legend(handles=lines, title=factors, loc="outside right upper")
    figure.supxlabel(labels[0])
    figure.supylabel(labels[1])
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=80)
    plt.close(figure)


def _draw_cell(axes: Axes, over: str, runs: Sequence[Sequence[Row]], colour: object) -> None:
    """The seeds' curves, and their mean at the steps at which all seeds that did not fail have an evaluation."""
    whole = []
    for rows in runs:
        known = [row for row in rows if None not in (row[over], row["accuracy"])]
        curve = {row["step"]: (row[over], row["accuracy"]) for row in known}
        axes.plot(*_columns(curve.values()), color=colour, alpha=0.3, linewidth=0.8)
        if rows[-1]["status"] != FAILED:
            whole.append(curve)
    shared = sorted(set.intersection(*map(set, whole))) if whole else []
    means = [[fmean(each) for each in _columns(curve[step] for curve in whole)] for step in shared]
    axes.plot(*_columns(means), color=colour)


def _columns(points: Iterable[Sequence[float]]) -> tuple[list[float], list[float]]:
    pairs = list(points)
    return [each for each, _ in pairs], [each for _, each in pairs]
