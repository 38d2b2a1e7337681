"""The pictures of studies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.studies.pictures import COMPARED, draw, title
from benchmarks.studies.summary import cell_of
from tests.benchmarks.studies.support import STUDIES, STUDY, row

RUNS = [
    [row(0, 0.1), row(1, 0.2, samples=0, seconds=0.0), row(2, 0.9, samples=8, seconds=3.0, evicted=8, idle=0.5)],
    [row(1, 0.4, samples=8, seconds=5.0), row(2, 0.8, samples=16, seconds=9.0, evicted=4, idle=0.7)],
]


@pytest.mark.parametrize("over", ["samples", "seconds"])
def test_an_evaluation_without_samples_or_seconds_is_not_in_the_picture(
    over: Literal["samples", "seconds"], tmp_path: Path
) -> None:
    draw(replace(STUDY, over=over), [], {("small", "red"): RUNS}, tmp_path / "toy.png")
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")


def test_two_figures_are_drawn_against_each_other_where_a_cell_has_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[float, ...]] = []

    def errorbar(axes: Axes, x: float, y: float, xerr: Any, yerr: Any, **named: object) -> None:
        drawn.append(tuple(round(each, 2) for each in (x, y, *xerr[0], *xerr[1], *yerr[0], *yerr[1])))

    monkeypatch.setattr(Axes, "errorbar", errorbar)
    cells = [
        cell_of({"size": "small", "colour": "red"}, 1e-4, RUNS, 0.8),
        cell_of({"size": "small", "colour": "blue"}, 1e-4, [[row(1, 0.4)]], 0.8),
    ]
    study = replace(STUDY, compared=("learner idle", "evicted"))
    draw(study, cells, {}, tmp_path / "toy.png")
    assert drawn == [(0.6, 0.35, 0.1, 0.1, 0.15, 0.15)]
    assert title(study) == "evicted against learner idle"
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")


def test_every_study_compares_figures_that_there_are() -> None:
    assert all(set(study.compared or ()) <= COMPARED.keys() for study in STUDIES)
