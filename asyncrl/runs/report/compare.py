"""`asyncrl compare RUN RUN ... [--html FILE] [--json]`: the differences between runs, and the results of each.

It shows the keys, versions and hardware that differ, and the results next to each other. It also shows the values of
each run after the same number of samples, sampled tokens and seconds of training. RUN is the folder of a run, such as
runs/NAME, or its name; it may still run. --html also writes a page with the curves of all runs in the same plots.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.config.commands import command_name
from asyncrl.config.option import as_yaml
from asyncrl.machine.files import write_whole
from asyncrl.runs.report.comparison import (
    AXES,
    MEASURES,
    STEPS,
    Axis,
    Comparison,
    Measure,
    axis_marks,
    axis_points,
    compare,
    spread,
)
from asyncrl.runs.report.episodes import visible
from asyncrl.runs.report.page import drawn, page
from asyncrl.runs.report.reported import read_run
from asyncrl.runs.report.svg import Plot, Series, short
from asyncrl.text import json_text

UNKNOWN = "-"
NOT_RECORDED = "not recorded"
SPREAD = ("held-out accuracy, last", "held-out outcome, last", "reward, last")


def main(argv: Sequence[str]) -> None:
    """The entry of the command line. Raises ConfigError: the runs cannot be compared."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, such as runs/NAME, or its name")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(argv)
    comparison = compare([read_run(name) for name in given.runs])
    if given.html is not None:
        write_whole(given.html, comparison_page(comparison))
    if given.json:
        sys.stdout.write(f"{json_text(as_plain(comparison))}\n")
    else:
        Console().print(as_tables(comparison), soft_wrap=True, highlight=False)


def as_plain(comparison: Comparison) -> dict[str, Any]:
    """The comparison for programs."""
    return {
        "statement": comparison.statement,
        "runs": [
            {"name": name, "folder": str(run.folder), "configuration": kind}
            for name, run, kind in zip(comparison.names, comparison.runs, comparison.configurations, strict=True)
        ],
        "configuration": comparison.configuration,
        "environment": comparison.environment,
        "results": comparison.results,
        "tables": [
            {"measure": table.measure, "axis": table.axis, "at": table.at, "values": table.values}
            for table in comparison.tables
        ],
        "curves": {
            measure.title: {
                axis.name: [axis_points(run, measure, axis) for run in comparison.runs] for axis in (STEPS, *AXES)
            }
            for measure in MEASURES
        },
    }


def as_tables(comparison: Comparison) -> RenderableType:
    """The comparison for a terminal."""
    parts: list[RenderableType] = []
    for title, rows in texts(comparison).items():
        parts += [Text(title, "bold"), _table(comparison.names, rows), Text()]
    for table in comparison.tables:
        title = f"{table.measure} at the same number of {table.axis}"
        values = {
            name: [UNKNOWN if value is None else f"{value:.3f}" for value in row]
            for name, row in zip(comparison.names, table.values, strict=True)
        }
        parts += [Text(title, "bold"), _table([short(point) for point in table.at], values), Text()]
    return Group(*parts, *(Text(line) for line in (*spreads(comparison), comparison.statement)))


def texts(comparison: Comparison) -> dict[str, dict[str, list[str]]]:
    """The tables that have a column for each run, by title."""
    configuration = {key: [as_yaml(value) for value in values] for key, values in comparison.configuration.items()}
    environment = {
        name: [NOT_RECORDED if not run.environments else value or UNKNOWN for run, value in pairs]
        for name, values in comparison.environment.items()
        if (pairs := list(zip(comparison.runs, values, strict=True)))
    }
    results = {name: [_text(name, value) for value in values] for name, values in comparison.results.items()}
    tables = {"Differences in configuration": configuration, "Differences in versions and hardware": environment}
    found = {title: rows for title, rows in tables.items() if rows}
    return {**found, "Results": results}


def spreads(comparison: Comparison) -> list[str]:
    """A line for each result of each configuration that has several runs."""
    return [
        f"configuration {kind + 1}, {count} runs: {name} {short(mean)} on average, from {short(least)} to {short(most)}"
        for name in SPREAD
        for kind, count, least, mean, most in spread(comparison, name)
    ]


def comparison_page(comparison: Comparison) -> str:
    """The comparison as a page."""
    sections = [
        (measure.title.capitalize(), drawn(_plot(comparison, measure, axis) for axis in (STEPS, *AXES)))
        for measure in MEASURES
    ]
    others = [Measure("lag", "lag/max"), Measure("learner idle", "idle"), Measure("length", "length/mean")]
    sections.append(("Speed and data", drawn(_plot(comparison, measure, STEPS) for measure in others)))
    return page(
        "comparison.html",
        f"{', '.join(comparison.names)}: comparison",
        names=comparison.names,
        folders=[str(run.folder) for run in comparison.runs],
        tables=texts(comparison),
        sections=[(title, plots) for title, plots in sections if plots],
        matched=[
            (table, [short(point) for point in table.at], zip(comparison.names, table.values, strict=True))
            for table in comparison.tables
        ],
        statement=comparison.statement,
        spreads=spreads(comparison),
    )


def _plot(comparison: Comparison, measure: Measure, axis: Axis) -> Plot:
    series = [
        Series(name, [x for x, _ in points], [y for _, y in points], has_dots=measure.is_held_out)
        for name, run in zip(comparison.names, comparison.runs, strict=True)
        for points in [axis_points(run, measure, axis)]
    ]
    marks = [
        mark
        for name, run in zip(comparison.names, comparison.runs, strict=True)
        for mark in axis_marks(name, run, axis)
    ]
    return Plot(f"{measure.title.capitalize()} by {axis.name}", axis.name, series, marks=marks)


def _table(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(Text(visible(column)), justify="right", overflow="fold")
    for name, values in rows.items():
        table.add_row(Text(visible(name), "dim"), *(Text(visible(value)) for value in values))
    return table


def _text(name: str, value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, float):
        return f"{value:.0%}" if name.endswith((" idle", "for labels")) else short(value)
    return str(value)
