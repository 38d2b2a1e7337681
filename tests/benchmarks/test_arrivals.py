"""The arithmetic of the rollout benchmark: rates, gaps, and what a push took."""

from __future__ import annotations

import pytest

from benchmarks.arrivals import Arrivals, cost_of


def arrivals(*times: float, tokens: int = 10) -> Arrivals:
    made = Arrivals()
    for at in times:
        made.add(at, tokens)
    return made


def steady(begin: int, end: int) -> list[float]:
    """Ten answers a second."""
    return [tenth / 10 for tenth in range(begin * 10, end * 10)]


def test_a_window_counts_its_begin_and_not_its_end() -> None:
    series = arrivals(0.0, 1.0, 1.5, 2.0)
    assert series.tokens(1.0, 2.0) == 20
    assert series.rate(0.0, 4.0) == 10
    assert series.windows(0.0, 1.0, 3) == [10, 20, 10]


def test_gaps_end_at_answers_within_a_stretch_or_lie_around_a_push() -> None:
    assert arrivals(0.0, 4.0, 5.0, 7.0, 20.0).longest_gap(1.0, 10.0) == 2.0
    series = arrivals(0.0, 1.0, 4.0, 4.5, 9.0)
    assert series.longest_gap_around(2.0, 3.0) == 3.0
    assert series.longest_gap_around(4.1, 4.2) == 0.5
    assert series.longest_gap_around(3.0, 5.0) == 4.5
    nothing = Arrivals()
    assert nothing.rate(0.0, 1.0) == nothing.longest_gap(0.0, 1.0) == nothing.longest_gap_around(0.0, 1.0) == 0


def test_a_push_that_stops_everything_costs_the_time_that_it_took() -> None:
    cost = cost_of(arrivals(*steady(0, 10), *steady(12, 30)), begin=10.0, end=12.0, calm_s=5.0)
    assert (cost.push_s, cost.before, cost.during, cost.after) == (2.0, 100, 0, 100)
    assert (cost.standstill_s, cost.lost_s) == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize(
    ("answers", "standstill_s"), [(steady(0, 30), 0.0), ([*steady(0, 10), *[12.0] * 20, *steady(12, 30)], 2.0)]
)
def test_a_push_that_nobody_notices_and_one_that_makes_answers_late_lose_nothing(
    answers: list[float], standstill_s: float
) -> None:
    cost = cost_of(arrivals(*answers), begin=10.0, end=12.0, calm_s=5.0)
    assert (cost.standstill_s, cost.lost_s) == pytest.approx((standstill_s, 0.0))


def test_without_answers_before_the_push_nothing_can_be_said() -> None:
    with pytest.raises(ValueError, match="make the calm time longer"):
        cost_of(arrivals(11.0, 12.0), begin=10.0, end=11.0, calm_s=5.0)
