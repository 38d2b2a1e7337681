"""The two parts of StableReinforce: a bound on the ratio, and a filter of advantages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.corrections.base import Ages
from asyncrl.algorithms.corrections.outliers import Outliers
from asyncrl.algorithms.losses.ppo import Ppo
from asyncrl.algorithms.losses.stable_reinforce import StableReinforce
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.errors import ConfigError
from tests.algorithms.support import alone, make_algorithm, make_episodes, make_tokens, make_updates, on_ranks


def ages_of(advantages: list[float], reduce=alone) -> Ages:
    values = torch.tensor(advantages, dtype=torch.float64)
    view = PolicyTokens.of(make_tokens([[1] * len(advantages)]))
    return Ages(view, torch.zeros_like(values), values, reduce=reduce)


def gradient_of(loss, updates) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss(updates).losses.sum(), updates.logprobs, retain_graph=True)
    return gradient


def test_a_ratio_beyond_the_bound_counts_as_the_bound_and_has_no_gradient():
    """e^8 = 2981. PPO has no bound for the first token, whose loss and gradient are 2981."""
    updates = make_updates([8.0, -8.0, 8.0, 0.1, 3.0], [-1, -1, 1, 1, -1])
    result = StableReinforce()(updates)
    assert result.losses.tolist() == pytest.approx([1000, 0.8, -1.2, -math.exp(0.1), math.exp(3)])
    assert gradient_of(StableReinforce(), updates).tolist() == pytest.approx([0, 0, 0, -math.exp(0.1), math.exp(3)])
    assert {name: mark.tolist() for name, mark in result.marks.items()} == {
        "high": [False, False, True, False, False],
        "low": [False, True, False, False, False],
        "bound": [True, True, True, False, False],
    }


@given(st.lists(st.tuples(st.floats(-6, 6), st.floats(-2, 2)), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_within_the_bound_it_is_ppo(tokens):
    updates = make_updates(*map(list, zip(*tokens, strict=True)))
    torch.testing.assert_close(StableReinforce()(updates).losses, Ppo()(updates).losses)
    torch.testing.assert_close(gradient_of(StableReinforce(), updates), gradient_of(Ppo(), updates))


def test_an_advantage_is_an_outlier_if_it_is_more_than_so_many_deviations_from_the_mean():
    """The mean of nineteen 0 and one 20 is 1, and the variance (19 + 19^2) / 20 = 19: 20 is 4.36 deviations away."""
    advantages = [0.0] * 19 + [20.0]
    assert Outliers().keep(ages_of(advantages)).tolist() == [True] * 19 + [False]
    assert Outliers(sigmas=4.35).keep(ages_of(advantages)).tolist() == [True] * 19 + [False]
    assert Outliers(sigmas=4.36).keep(ages_of(advantages)).all()


@given(
    st.lists(st.floats(-5, 5, width=16), min_size=3, max_size=30),
    st.integers(1, 3),
    st.floats(1, 3),
    st.sampled_from([0.25, 2.0, 8.0]),
    st.sampled_from([-4.0, 0.0, 2.0]),
)
@settings(max_examples=40, deadline=None)
def test_the_filter_depends_on_neither_the_ranks_nor_the_unit_of_the_advantages(values, ranks, sigmas, unit, shift):
    rule = Outliers(sigmas=sigmas)
    mean = sum(values) / len(values)
    variance = sum((each - mean) ** 2 for each in values) / len(values)
    clear = [abs((each - mean) ** 2 - sigmas**2 * variance) > 1e-6 for each in values]
    expected = [(each - mean) ** 2 <= sigmas**2 * variance for each in values]

    def work(rank, reduce):
        return rule.keep(ages_of([unit * each + shift for each in values[rank::ranks]], reduce)).tolist()

    for rank, found in enumerate(on_ranks(ranks, work)):
        for is_clear, one, other in zip(clear[rank::ranks], found, expected[rank::ranks], strict=True):
            assert one == other or not is_clear


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=10))
def test_of_ten_tokens_none_can_be_three_deviations_away(values):
    assert Outliers(sigmas=3.0001).keep(ages_of(values)).all()


@given(st.floats(-5, 5, width=32), st.integers(3, 60), st.integers(1, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_advantages_that_are_equal_or_opposite_are_all_kept_also_at_one_deviation(value, count, ranks, opposite):
    """Rounding moves the mean of equal numbers away from them, and the distances of opposite numbers apart."""
    values = [value, -value] * count if opposite else [value] * count

    def work(rank, reduce):
        return Outliers(sigmas=1.0).keep(ages_of(values[rank::ranks], reduce)).all().item()

    assert all(on_ranks(ranks, work))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=10))
def test_a_batch_never_loses_all_of_its_tokens_and_a_limit_that_could_take_them_is_refused(values):
    assert Outliers(sigmas=1.0).keep(ages_of(values)).any()
    with pytest.raises(ConfigError, match="sigmas"):
        make_algorithm(correction=[("outliers", {"sigmas": 0.99})])


def test_nothing_is_an_outlier_of_nothing():
    tokens = make_tokens([[0]])
    prepared = make_algorithm(correction=["outliers"]).prepare(make_episodes([1], [0]), tokens, alone)
    assert prepared.rejected.tolist() == [0]
