"""The scale of the learning rate by the effective sample size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.batch import Tokens
from asyncrl.algorithms.from_config import composition_of
from asyncrl.errors import ConfigError
from tests.algorithms.support import alone, make_algorithm, make_config, make_episodes, make_tokens, rows, totals_of

LOG2 = math.log(2)
RATIOS = st.lists(st.floats(-3, 3), min_size=1, max_size=8)


def scale_of(tokens: Tokens, logprobs: torch.Tensor, split: list[list[int]] | None = None, **changes) -> float:
    """The factor of an update whose policy has these log-probs, from the micro-batches of `split`."""
    rule = changes.pop("rule", {})
    algorithm = make_algorithm(lr_scale=("ess", rule), advantage="dr_grpo", **changes)
    count = int(tokens.sequence.max()) + 1
    episodes = make_episodes([1.0] * count, [0] * count)
    prepared = algorithm.prepare(episodes, tokens, alone)
    sums: dict[str, torch.Tensor] = {}
    for members in split or [list(range(count))]:
        place = rows(tokens, members)
        _, found = algorithm.loss(logprobs[place], prepared.select(place), totals_of(tokens, episodes))
        sums = {name: sums.get(name, 0) + value for name, value in found.items()}
    return algorithm.lr_scale(sums)


def of_sequences(log_ratios: list[float], **changes) -> float:
    """The factor for sequences of one token whose log pi_theta - log mu are these."""
    tokens = make_tokens([[1] for _ in log_ratios])
    return scale_of(tokens, torch.tensor(log_ratios, dtype=torch.float64), **changes)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, math.sqrt(7 / 9)),
        ({"rule": "linear"}, 7 / 9),
        ({"base": 0.9}, math.sqrt(70 / 81)),
        ({"base": 0.5}, 1.0),
    ],
)
def test_the_factor_follows_the_effective_sample_size_of_the_sequences(rule, expected):
    """w = 2, 1 and 1/2, since the ratios of a sequence are multiplied and tool tokens have none: the effective sample
    size is 3.5^2 / (3 * 5.25) = 7/9."""
    tokens = make_tokens([[1, 0, 1], [1], [0, 1]])
    logprobs = torch.tensor([2 * LOG2, 9.0, -LOG2, 0.0, 9.0, -LOG2], dtype=torch.float64)
    assert scale_of(tokens, logprobs, rule=rule) == pytest.approx(expected)
    assert scale_of(tokens, logprobs, [[2], [0], [1]], rule=rule) == pytest.approx(expected)


@given(RATIOS, st.floats(-15, 15))
@settings(max_examples=40, deadline=None)
def test_the_factor_is_1_for_equal_weights_at_least_that_of_one_sequence_and_the_same_in_any_unit(ratios, shift):
    scale = of_sequences(ratios)
    assert 1 / math.sqrt(len(ratios)) - 1e-9 <= scale <= 1
    assert of_sequences([each + shift for each in ratios]) == pytest.approx(scale)
    assert of_sequences(ratios[::-1]) == pytest.approx(scale)
    assert of_sequences([shift] * len(ratios)) == pytest.approx(1)


def test_a_sequence_that_outweighs_all_others_leaves_the_learning_rate_of_one_sequence():
    assert of_sequences([19.0, 0.0, 0.0, 0.0]) == pytest.approx(0.5, abs=1e-6)
    assert of_sequences([500.0, -500.0, 0.0, 0.0]) == pytest.approx(0.5, abs=1e-6)


def test_the_weights_of_long_sequences_differ_though_all_of_them_are_tiny():
    """Each sequence has ten tokens: w = e^-60, e^-60 / 2 and e^-60 / 4, so the size is (7/4)^2 / (3 * 21/16) = 7/9."""
    tokens = make_tokens([[1] * 10] * 3)
    each = torch.tensor([-6.0, -6 - LOG2 / 10, -6 - LOG2 / 5], dtype=torch.float64)
    assert scale_of(tokens, each.repeat_interleave(10)) == pytest.approx(math.sqrt(7 / 9))


def test_the_factor_follows_the_policy_whatever_the_proximal_policy_is_and_leaves_out_dropped_tokens():
    tokens = make_tokens([[1], [1]])
    tokens = replace(tokens, proximal=torch.tensor([0.0, 3.0], dtype=torch.float64))
    moved = torch.tensor([0.0, LOG2], dtype=torch.float64)
    expected = math.sqrt(9 / 10)
    assert scale_of(tokens, moved) == pytest.approx(expected)
    assert scale_of(tokens, moved, correction=[], proximal="behaviour") == pytest.approx(expected)
    drop = {"correction": [("reject", {"over": "token", "high": 0.1})]}
    assert scale_of(tokens, moved, **drop) == 1
    assert scale_of(tokens, torch.tensor([0.0, torch.nan], dtype=torch.float64), **drop) == 1


def test_sequences_without_policy_tokens_and_demonstrations_do_not_count():
    tokens = make_tokens([[1], [0], [1], [1]])
    tokens = replace(tokens, demonstrated=torch.tensor([False, False, False, True]))
    logprobs = torch.tensor([0.0, 5.0, LOG2, 7.0], dtype=torch.float64)
    assert scale_of(tokens, logprobs) == pytest.approx(math.sqrt(9 / 10))
    assert of_sequences([0.0]) == 1
    assert scale_of(make_tokens([[0]]), torch.zeros(1, dtype=torch.float64)) == 1


def test_by_default_the_learning_rate_is_that_of_the_schedule():
    algorithm = make_algorithm()
    assert not algorithm.scales_lr
    assert algorithm.lr_scale({}) == 1
    assert make_algorithm(lr_scale="ess").scales_lr


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("vcpo", r"algorithm.lr_scale=vcpo: did you mean the preset algorithm=vcpo"),
        (("ess", {"base": 0.0}), r"algorithm.lr_scale ess: base=0.0: it must be a number in \(0, 1\]"),
        (("ess", {"base": 1.5}), r"base=1.5: it must be a number in"),
        (("ess", {"rule": "cube"}), r"rule='cube': it must be one of sqrt, linear"),
        (("none", {"base": 1.0}), r"none has no parameter 'base'"),
    ],
)
def test_a_wrong_scale_is_refused_with_what_is_allowed(choice, message):
    with pytest.raises(ConfigError, match=message):
        composition_of(make_config(lr_scale=choice))
