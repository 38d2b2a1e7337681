"""Plots as SVG."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from asyncrl.runs.report.svg import MOST_POINTS, Plot, Series, binned, draw, short, ticks


def plot(*series: Series, **options: bool) -> Plot:
    return Plot("<Reward>", "step", series, **options)


def test_a_plot_is_well_formed_and_its_texts_are_escaped() -> None:
    drawn = draw(plot(Series("<script>", [0, 1, 2], [1.0, None, 3.0]), Series("b", [0, 2], [2.0, math.nan])))
    assert drawn is not None
    root = ElementTree.fromstring(drawn.svg)
    assert root.get("aria-label") == "<Reward> by step: <script>, b"
    assert len(root.findall("polyline")) == 2
    assert [label for _, label, _ in drawn.legend] == ["<script>", "b"]


def test_a_plot_without_values_is_none() -> None:
    assert draw(plot()) is None
    assert draw(plot(Series("a", [0, 1], [None, math.inf]))) is None


@pytest.mark.parametrize("ys", [[0.0], [5.0], [-1e-12] * 3, [1e300, -1e300], [0.0, 0.0]])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_any_finite_values_are_drawn(ys: list[float], is_stacked: bool) -> None:
    drawn = draw(plot(Series("a", range(len(ys)), ys), is_stacked=is_stacked))
    assert drawn is not None
    assert "nan" not in drawn.svg
    assert "inf" not in drawn.svg


def test_many_points_become_means() -> None:
    drawn = draw(plot(Series("a", range(10 * MOST_POINTS), [1.0] * (10 * MOST_POINTS))))
    assert drawn is not None
    assert drawn.bin_size == 10
    assert binned([(0, 1.0), (1, 3.0), (2, 5.0)], 2) == [(0.5, 2.0), (2, 5.0)]


def test_stacked_curves_lie_on_each_other() -> None:
    drawn = draw(plot(Series("a", [0, 1], [1.0, 1.0]), Series("b", [0, 1], [2.0, 2.0]), is_stacked=True))
    assert drawn is not None
    lower, upper = (
        [float(point.split(",")[1]) for point in each.get("points", "").split()] for each in _areas(drawn.svg)
    )
    assert max(upper) == pytest.approx(min(lower))
    assert [last for _, _, last in drawn.legend] == ["1", "2"]


def test_a_curve_that_begins_late_makes_no_gaps_in_the_one_below_it() -> None:
    many = 4 * MOST_POINTS
    late = Series("b", range(many - 200, many), [2.0] * 200)
    drawn = draw(plot(Series("a", range(many), [1.0] * many), late, is_stacked=True))
    assert drawn is not None
    *top, _, _ = (point.split(",")[1] for point in _areas(drawn.svg)[0].get("points", "").split())
    assert len(set(top)) == 1
    assert len(top) == MOST_POINTS


def _areas(svg: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall("polygon")


def test_numbers_are_short_and_ticks_are_round() -> None:
    assert [short(value) for value in (0.12345, 1234, 12_345, 4.2e7, 0)] == ["0.123", "1234", "12.3k", "42M", "0"]
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert ticks(3, 97) == [20, 40, 60, 80]


@pytest.mark.parametrize(
    ("value", "text"),
    [(999.7, "1000"), (999_600, "1M"), (12_345, "12.3k"), (1234, "1234"), (0.5, "0.5"), (-1e7, "-10M")],
)
def test_a_number_is_rounded_before_its_unit_is_chosen(value: float, text: str) -> None:
    assert short(value) == text
