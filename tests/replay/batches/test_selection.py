"""The comparison of what is trained with what was sampled: numbers worked by hand, and simulated runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.replay.batches.selection import FALSE_ALARM, MIXTURE, QUANTITIES, Contrast, Selection, Sums, sum_selections

Draw = Callable[[np.random.Generator, int], np.ndarray]


def contrast(trained: Sequence[float], evicted: Sequence[float]) -> Contrast:
    values = [*trained, *evicted]
    return Contrast.of_sums(len(trained), len(evicted), sum(trained), sum(values), sum(x * x for x in values))


def test_a_cohort_compares_its_trained_groups_with_its_trained_and_evicted_ones() -> None:
    found = contrast([1.0, 2.0], [3.0])
    # The mean is 2 and the standard deviation 1.
    assert found.deviation == pytest.approx(-1.0)
    assert found.variance == pytest.approx(2 / 3)
    assert found.shift == pytest.approx(-0.5)


def test_the_evidence_is_the_mixture_of_all_normal_alternatives() -> None:
    found = Contrast(-30.0, 40.0, 100)
    shifts = np.linspace(-3, 3, 200_001)
    prior = np.exp(-(shifts**2) * MIXTURE / 2) * math.sqrt(MIXTURE / (2 * math.pi))
    ratio = np.exp(shifts * found.deviation - shifts**2 * found.variance / 2)
    assert found.log_evidence == pytest.approx(math.log(np.trapezoid(prior * ratio, shifts)), abs=1e-6)


@given(st.lists(st.integers(0, 40), min_size=3, max_size=7).filter(lambda each: len(set(each)) > 1), st.data())
def test_over_all_choices_of_evicted_groups_the_deviation_has_mean_0_and_the_given_variance(
    values: list[int], data: st.DataObject
) -> None:
    evicted = data.draw(st.integers(1, len(values) - 1))
    found = []
    for chosen in combinations(range(len(values)), evicted):
        rest = [float(x) for index, x in enumerate(values) if index not in chosen]
        found.append(contrast(rest, [float(values[index]) for index in chosen]))
    deviations = [each.deviation for each in found]
    assert np.mean(deviations) == pytest.approx(0, abs=1e-9)
    assert np.var(deviations) == pytest.approx(found[0].variance)


@pytest.mark.parametrize(("trained", "evicted"), [([1.0, 5.0], []), ([], [1.0, 5.0]), ([0.1] * 9, [0.1] * 4)])
def test_a_cohort_without_a_comparison_says_nothing(trained: list[float], evicted: list[float]) -> None:
    assert contrast(trained, evicted) == Contrast()


SHAPES: dict[str, Draw] = {
    "the logarithm of lengths with a heavy tail": lambda dice, count: np.log1p(dice.pareto(1.1, count)),
    "rewards that are nearly always 0": lambda dice, count: (dice.random(count) < 0.05).astype(float),
    "few different turns": lambda dice, count: np.log1p(dice.integers(1, 4, count)),
}


def simulated(dice: np.random.Generator, draw: Draw, groups: int, chance: Callable[[float], float]) -> list[Contrast]:
    """The sums of a run after each of its cohorts. `chance` is the probability to be evicted, given the quantity."""
    total, found = Contrast(), []
    for _ in range(40):
        values = draw(dice, groups)
        is_evicted = dice.random(groups) < [chance(x) for x in values]
        total = total + contrast(list(values[~is_evicted]), list(values[is_evicted]))
        found.append(total)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("groups", "evicted"), [(4, 0.25), (32, 0.05)])
def test_a_run_that_is_looked_at_after_each_cohort_seldom_gets_a_false_alarm(
    shape: str, groups: int, evicted: float
) -> None:
    dice, runs, false_alarm = np.random.default_rng(0), 150, 0.1
    alarms = 0
    for _ in range(runs):
        looks = simulated(dice, SHAPES[shape], groups, lambda value: evicted)
        alarms += any(each.is_bias(false_alarm) for each in looks)
        assert not any(each.is_bias() for each in looks)
    # The three quantities share the false alarms.
    assert alarms <= runs * false_alarm / len(QUANTITIES)


def test_a_run_that_evicts_its_longest_groups_is_biased() -> None:
    dice = np.random.default_rng(0)
    draw = SHAPES["the logarithm of lengths with a heavy tail"]
    for _ in range(20):
        last = simulated(dice, draw, 16, lambda value: 0.6 if value > 2 else 0.02)[-1]
        assert last.is_bias()
        assert last.shift < 0


def sums(*episodes: tuple[int, int, float | None]) -> Sums:
    found = Sums()
    for tokens, turns, reward in episodes:
        found.add(tokens, turns, reward)
    return found


def test_means_leave_out_what_is_unknown() -> None:
    assert Sums().means == {"length": None, "turns": None, "reward": None}
    assert sums((10, 1, 0.5), (30, 3, None)).means == {"length": 20.0, "turns": 2.0, "reward": 0.5}


def test_lengths_are_counted_by_powers_of_two() -> None:
    found = Selection({"trained": sums((0, 1, 0), (1, 1, 0), (127, 1, 0), (128, 1, 0), (255, 1, 0))})
    assert found.by_length()["trained"] == {0: 1, 1: 1, 64: 1, 128: 2}


def test_the_metrics_of_all_shards_give_the_selection_of_the_run() -> None:
    one = Selection({"trained": sums((10, 1, 0.5)), "evicted": sums((99, 4, 1.0))}, {"length": Contrast(-2.0, 1.0, 3)})
    other = Selection({"trained": sums((0, 2, -1.0)), "dead": sums((7, 1, None))}, {"reward": Contrast(1.0, 2.0, 4)})
    rows = [{"version": 3, **dict(each.values())} for each in (one, other)]
    assert Selection.from_values(rows) == one + other == sum_selections([one, other])
    assert Selection.from_values([{"version": 3}]).shown == {}


def test_described_selections_begin_with_all_sampled_episodes() -> None:
    found = Selection({"evicted": sums((30, 3, 1.0)), "trained": sums((10, 1, 0.0))}).described()
    assert list(found) == ["sampled", "trained", "evicted"]
    assert found["sampled"] == {"episodes": 2, "length": 20.0, "turns": 2.0, "reward": 0.5}


def test_a_shift_must_be_certain_and_large_to_count_as_a_bias() -> None:
    certain_and_large, tiny, unsure = Contrast(-90.0, 100.0, 900), Contrast(-90.0, 100.0, 90_000), Contrast(-9, 100, 90)
    found = Selection({}, {"length": certain_and_large, "turns": tiny, "reward": unsure})
    assert found.biased() == ["length"]
    assert tiny.is_bias(FALSE_ALARM)
