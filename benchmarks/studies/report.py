"""Writes the tables and the picture of a study between its markers in benchmarks/results/studies.md.

The page has a few figures of each cell. A second page, next to the picture, has all figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.studies import pictures
from benchmarks.studies.figures import Row
from benchmarks.studies.study import Study
from benchmarks.studies.summary import Cell, Spread

PAGE = Path(__file__).parents[1] / "results" / "studies.md"
BESIDE = "studies"
"""The folder next to the page, for pictures and for tables with all figures."""
MARKER, END = "<!-- study ", "<!-- end -->"

FIGURES: Mapping[str, Callable[[Cell], str]] = {
    "lr": lambda cell: f"{cell.lr:g}",
    "seeds": lambda cell: str(cell.seeds),
    "failed": lambda cell: str(cell.failed),
    "collapsed": lambda cell: str(cell.collapsed),
    "samples to target": lambda cell: _to_target(cell.samples_to_target),
    "seconds to target": lambda cell: _to_target(cell.seconds_to_target),
    "seconds of all steps": lambda cell: _shown(cell.step_seconds, "{:,.0f}"),
    "best accuracy": lambda cell: _shown(cell.best, "{:.2f}"),
    "last accuracy": lambda cell: _shown(cell.last, "{:.2f}"),
    "gain": lambda cell: _of_seeds(cell, cell.gain, "{:+.2f}"),
    "lag used, mean": lambda cell: _shown(cell.lag_mean, "{:.1f}"),
    "lag used, largest": lambda cell: _shown(cell.lag_max, "{:.0f}"),
    "entropy": lambda cell: _shown(cell.entropy, "{:.3f}"),
    "ess, least": lambda cell: _shown(cell.ess, "{:.2f}"),
    "mismatch, k3": lambda cell: _shown(cell.k3, "{:.1e}"),
    "evicted": lambda cell: _shown(cell.evicted_share, "{:.0%}"),
    "length, trained / sampled": lambda cell: _shown(cell.trained_length, "{:.2f}"),
    "learner idle": lambda cell: _shown(cell.idle, "{:.0%}"),
    "reward, change": lambda cell: _shown(cell.reward_change, "{:+.2f}"),
    "agreement, change": lambda cell: _shown(cell.agreement_change, "{:+.2f}"),
    "hack alarms": lambda cell: _shown(cell.hack_alarms, "{:.0f}"),
}
"""The text of each figure of a cell, by the figure's name."""


def marker(study: str) -> str:
    return f"{MARKER}{study} -->"


def table(study: Study, cells: Sequence[Cell]) -> str:
    """A row for each cell with all figures that some cell has: medians over the seeds, with the least and the
    greatest."""
    columns = {name: [figure(cell) for cell in cells] for name, figure in FIGURES.items()}
    known = {name: column for name, column in columns.items() if any(column)}
    rows = [[*cell.levels.values(), *figures] for cell, *figures in zip(cells, *known.values(), strict=True)]
    return _lines([*study.factors, *known], rows)


def overview(study: Study, cells: Sequence[Cell]) -> str:
    """A table for each figure that the study shows: a column for each level of the first factor, a row for each
    combination of the others. The first table also says where runs failed, collapsed or have not ended yet."""
    first, *others = study.factors
    columns = [level for level in study.factors[first] if any(cell.levels[first] == level for cell in cells)]
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault(tuple(cell.levels[factor] for factor in others), {})[cell.levels[first]] = cell
    seeds = max((cell.seeds for cell in cells), default=0)
    tables = []
    for name in study.shown:
        figure = partial(_told, FIGURES[name], seeds) if name == study.shown[0] else FIGURES[name]
        body = [
            [*levels, _rates(row.values()), *(figure(row[each]) if each in row else "" for each in columns)]
            for levels, row in rows.items()
        ]
        tables.append(f"**{name.capitalize()}**, by `{first}`:\n\n{_lines([*others, 'lr', *columns], body)}")
    return "\n\n".join(tables)


def conditions(study: Study, rows: Sequence[Row]) -> str:
    """The conditions of the measurement, from the rows of all runs."""
    runs = {row["fingerprint"]: row for row in rows}.values()
    seeds = sorted({row["seed"] for row in runs})
    machines = sorted({f"{row['machine']} ({_runs(row['parallel'])} at a time)" for row in runs})
    dates = sorted({row["date"] for row in runs})
    sizes = ", ".join(sorted({f"{row['steps']} steps of {row['batch']} trajectories" for row in runs}))
    rungs = ", ".join(sorted({f"`{row['rung']}`" for row in runs}))
    compared = ", ".join(f"`{factor}` {level}" for factor, level in study.baseline.items())
    gain = f" A gain is a run's mean accuracy less that of the run with {compared}, the same seed and the same policy."
    return (
        f"{'Experiment' if study.experiment else 'Task'} {rungs}; {sizes}; target {study.target:g}; seeds "
        f"{', '.join(map(str, seeds))}; {len(runs)} runs. Measured on {' to '.join({dates[0]: 0, dates[-1]: 0})} with "
        f"{'; '.join(machines)}. "
        "Each figure is the median over the seeds, in parentheses the least and the greatest. A run has collapsed if "
        "its last accuracy is at most half of its best one, and clearly below it."
        f"{gain if compared else ''}"
    )


def _runs(count: int) -> str:
    return "one run" if count == 1 else f"{count} runs"


def failures(cells: Sequence[Cell]) -> str:
    """The reasons of failed runs, a line for each cell; empty if no run failed. Of a reason of several lines only the
    first and the last are shown."""
    named = [(", ".join(cell.levels.values()), reason.splitlines()) for cell in cells for reason in cell.reasons]
    return "\n".join(f"* {levels}: {' '.join(dict.fromkeys([*lines[:1], *lines[-1:]]))}" for levels, lines in named)


def write_page(page: Path, study: Study, about: str, cells: Sequence[Cell], curves: pictures.Curves) -> None:
    """Write the study's section of the page, which begins with `about`, and next to the page a picture and all figures.

    Raises ValueError: see `write_section`.
    """
    picture, further = (f"{BESIDE}/{study.name}.{suffix}" for suffix in ("png", "md"))
    parts_of(page, study)  # Raises before anything is written.
    drawn = pictures.draw(study, curves, page.parent / picture)
    shown = f"![{pictures.title(study)}]({picture})\n\n{drawn}"
    link = f"All figures of each combination are in [{further}]({further})."
    parts = [about, shown, overview(study, cells), link, failures(cells)]
    write_section(page, study, "\n\n".join(filter(None, parts)))
    title = f"# All figures of the study `{study.name}`\n{study.question} [{page.name}](../{page.name}) says more."
    (page.parent / further).write_text("\n\n".join([title, about, table(study, cells)]) + "\n")


def write_section(page: Path, study: Study, text: str) -> None:
    """Put `text` between the study's markers. Raises ValueError: see `parts_of`."""
    head, tail = parts_of(page, study)
    page.write_text(f"{head}\n{text.strip()}\n{tail}")


def parts_of(page: Path, study: Study) -> tuple[str, str]:
    """The page up to the study's first marker, and from the last marker on. Raises ValueError: a marker is missing, or
    the page cannot be read."""
    try:
        written = page.read_text()
    except OSError as error:
        raise ValueError(f"{page} cannot be read: {error}") from error
    head, begin, rest = written.partition(marker(study.name))
    section, end, tail = rest.partition(END)
    if not (begin and end) or MARKER in section:
        raise ValueError(f"{page} has no place for the study {study.name}: write {marker(study.name)} and {END}")
    return head + begin, end + tail


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _rates(cells: Iterable[Cell]) -> str:
    return ", ".join(dict.fromkeys(map(FIGURES["lr"], cells)))


def _told(figure: Callable[[Cell], str], seeds: int, cell: Cell) -> str:
    """The figure of a cell, with notes on failed, collapsed and missing runs. Complete cells have one run for each of
    `seeds`."""
    notes = {
        f"{cell.failed} failed": cell.failed,
        f"{cell.collapsed} collapsed": cell.collapsed,
        f"{cell.seeds} of {seeds} seeds": cell.seeds < seeds,
    }
    return "; ".join(filter(None, [figure(cell), *(note for note, holds in notes.items() if holds)]))


def _to_target(spread: Spread | None) -> str:
    """The samples to the target, or "never" for seeds that did not reach it."""
    return _shown(spread, "{:,.0f}").replace("inf", "never")


def _of_seeds(cell: Cell, spread: Spread | None, form: str) -> str:
    """The figure, with the number of seeds that have a value if some have none."""
    shown = _shown(spread, form)
    return shown if spread is None or spread.count == cell.seeds else f"{shown}; {spread.count} of {cell.seeds} seeds"


def _shown(spread: Spread | None, form: str) -> str:
    if spread is None:
        return ""
    least, median, greatest = (form.format(each) for each in (spread.least, spread.median, spread.greatest))
    return median if least == greatest else f"{median} ({least} to {greatest})"
