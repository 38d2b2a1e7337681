"""The table and the picture of a study, and their place in docs/studies.md: between markers, which are written anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.studies.figures import Row
from benchmarks.studies.study import Study
from benchmarks.studies.summary import Cell, Spread

PAGE = Path(__file__).parents[2] / "docs" / "studies.md"
PICTURES = "studies"
"""The folder of pictures beside the page."""
END = "<!-- end -->"

_COLUMNS = (
    *("lr", "seeds", "failed", "collapsed", "samples to target", "seconds to target", "best accuracy"),
    *("last accuracy", "lag used, mean", "lag used, largest", "entropy", "ess, least", "evicted", "learner idle"),
)


def marker(study: str) -> str:
    return f"<!-- study {study} -->"


def table(study: Study, cells: Sequence[Cell]) -> str:
    """A row for each cell: medians over the seeds, with the least and the greatest value."""
    columns = [*study.factors, *_COLUMNS]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join([*cell.levels.values(), *_figures(cell)]) + " |" for cell in cells]
    return "\n".join(lines)


def conditions(study: Study, rows: Sequence[Row]) -> str:
    """What the figures were measured with, from the rows of all runs."""
    runs = {row["fingerprint"]: row for row in rows}.values()
    seeds = sorted({row["seed"] for row in runs})
    machines = sorted({f"{row['machine']} ({row['parallel']} runs at a time)" for row in runs})
    dates = sorted({row["date"] for row in runs})
    sizes = ", ".join(sorted({f"{row['steps']} steps of {row['batch']} trajectories" for row in runs}))
    rungs = ", ".join(sorted({f"`{row['rung']}`" for row in runs}))
    return (
        f"Task {rungs}; {sizes}; target {study.target:g}; seeds "
        f"{', '.join(map(str, seeds))}; {len(runs)} runs. Measured on {' to '.join({dates[0]: 0, dates[-1]: 0})} with "
        f"{'; '.join(machines)}. "
        "Each figure is the median over the seeds, in parentheses the least and the greatest."
    )


def failures(cells: Sequence[Cell]) -> str:
    """Why runs failed, a line a cell; empty if none did."""
    named = [(", ".join(cell.levels.values()), reason) for cell in cells for reason in cell.reasons]
    return "\n".join(f"* {levels}: {' '.join(reason.split())}" for levels, reason in named)


def write_section(page: Path, study: Study, text: str) -> None:
    """Put `text` between the study's markers. Raises ValueError: the page does not have them."""
    written = page.read_text()
    head, begin, rest = written.partition(marker(study.name))
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no place for the study {study.name}: write {marker(study.name)} and {END}")
    page.write_text(f"{head}{begin}\n{text.strip()}\n{end}{tail}")


def draw(study: Study, curves: Mapping[tuple[str, ...], Sequence[Sequence[Row]]], picture: Path) -> None:
    """Accuracy over trained samples as a PNG: a panel for each level of `study.panels`, a line for each cell in it, and
    thin lines for its seeds. `curves` has the runs of each cell by the names of its levels."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    place = list(study.factors).index(study.panels)
    panels = sorted({key[place] for key in curves}, key=list(study.factors[study.panels]).index)
    width = min(4, len(panels))
    height = -(-len(panels) // width)
    figure, grid = plt.subplots(
        height, width, figsize=(4 * width, 3 * height), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    shown = {key[:place] + key[place + 1 :]: None for key in curves}
    colours = {key: plt.get_cmap("viridis")(index / max(1, len(shown) - 1)) for index, key in enumerate(shown)}
    for axes, panel in zip(grid.flat, panels, strict=False):
        for key, runs in curves.items():
            if key[place] == panel:
                rest = key[:place] + key[place + 1 :]
                _draw_cell(axes, runs, colours[rest], ", ".join(rest) or panel)
        axes.set(title=f"{study.panels} {panel}", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    grid.flat[0].legend(fontsize="x-small")
    figure.supxlabel("trained trajectories")
    figure.supylabel("held-out accuracy, greedy")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=80)
    plt.close(figure)


def _draw_cell(axes: object, runs: Sequence[Sequence[Row]], colour: object, label: str) -> None:
    """The seeds' curves, and their mean where all of them have an evaluation."""
    known = [{row["samples"]: row["accuracy"] for row in rows if row["accuracy"] is not None} for rows in runs]
    for curve in known:
        axes.plot(list(curve), list(curve.values()), color=colour, alpha=0.3, linewidth=0.8)  # type: ignore[attr-defined]
    shared = sorted(set.intersection(*map(set, known))) if known else []
    means = [sum(curve[samples] for curve in known) / len(known) for samples in shared]
    axes.plot(shared, means, color=colour, label=label)  # type: ignore[attr-defined]


def _figures(cell: Cell) -> list[str]:
    return [
        f"{cell.lr:g}",
        str(cell.seeds),
        str(cell.failed),
        str(cell.collapsed),
        _to_target(cell, cell.samples_to_target),
        _to_target(cell, cell.seconds_to_target),
        _shown(cell.best, "{:.2f}"),
        _shown(cell.last, "{:.2f}"),
        _shown(cell.lag_mean, "{:.1f}"),
        _shown(cell.lag_max, "{:.0f}"),
        _shown(cell.entropy, "{:.3f}"),
        _shown(cell.ess, "{:.2f}"),
        _shown(cell.evicted_share, "{:.0%}"),
        _shown(cell.idle, "{:.0%}"),
    ]


def _to_target(cell: Cell, spread: Spread | None) -> str:
    """With the number of seeds that reached it, where some did not."""
    if spread is None:
        return "never"
    shown = _shown(spread, "{:,.0f}")
    return shown if cell.reached == cell.seeds else f"{shown}; {cell.reached} of {cell.seeds} seeds"


def _shown(spread: Spread | None, form: str) -> str:
    if spread is None:
        return ""
    least, median, greatest = (form.format(each) for each in (spread.least, spread.median, spread.greatest))
    return median if least == greatest else f"{median} ({least} to {greatest})"
