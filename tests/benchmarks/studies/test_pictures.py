"""The pictures of studies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.studies.pictures import COMPARED, draw, title
from tests.benchmarks.studies.support import STUDIES, STUDY, row

RUNS = [
    [row(0, 0.1), row(1, 0.2, samples=0, seconds=0.0), row(2, 0.9, samples=8, seconds=3.0, evicted=8, idle=0.5)],
    [row(1, 0.4, samples=8, seconds=5.0), row(2, 0.8, samples=16, seconds=9.0, evicted=4, idle=0.7)],
]


@pytest.mark.slow
@pytest.mark.parametrize("over", ["samples", "seconds"])
def test_an_evaluation_without_samples_or_seconds_is_not_in_the_picture(
    over: Literal["samples", "seconds"], tmp_path: Path
) -> None:
    draw(replace(STUDY, over=over), {("small", "red"): RUNS}, tmp_path / "toy.png")
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_mean_line_of_a_cell_is_of_the_runs_that_did_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[list[float], list[float]]] = []
    monkeypatch.setattr(Axes, "plot", lambda axes, x, y, **named: drawn.append((x, y)))
    failed = [row(1, 0.3, samples=0, status="failed")]
    draw(STUDY, {("small", "red"): [RUNS[1], failed]}, tmp_path / "toy.png")
    assert drawn == [([8, 16], [0.4, 0.8]), ([0], [0.3]), ([8, 16], [0.4, 0.8])]


@pytest.mark.parametrize("compared", [None, ("agreement, change", "last accuracy")])
def test_runs_without_any_figure_make_an_empty_picture(compared: tuple[str, str] | None, tmp_path: Path) -> None:
    failed = [row(None, status="failed")]
    draw(replace(STUDY, compared=compared), {("small", "red"): [failed]}, tmp_path / "toy.png")
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")


def test_two_figures_are_drawn_against_each_other_where_runs_have_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[float, float, int]] = []

    def plot(axes: Axes, x: float, y: float, form: str, markersize: int, **named: object) -> None:
        drawn.append((round(x, 2), round(y, 2), markersize))

    monkeypatch.setattr(Axes, "plot", plot)
    study = replace(STUDY, compared=("learner idle", "evicted"))
    draw(study, {("small", "red"): RUNS, ("small", "blue"): [[row(1, 0.4)]]}, tmp_path / "toy.png")
    assert drawn == [(0.5, 0.5, 3), (0.7, 0.2, 3), (0.6, 0.35, 8)]
    assert title(study) == "evicted against learner idle"
    assert (tmp_path / "toy.png").read_bytes().startswith(b"\x89PNG")


def test_every_study_compares_figures_that_there_are() -> None:
    assert all(set(study.compared or ()) <= COMPARED.keys() for study in STUDIES)
