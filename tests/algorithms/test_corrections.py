from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.corrections.base import Ages
from asyncrl.algorithms.corrections.m2po import M2po
from asyncrl.algorithms.corrections.mask import Mask
from asyncrl.algorithms.corrections.normalise import Normalise
from asyncrl.algorithms.corrections.opsm import Opsm
from asyncrl.algorithms.corrections.reject import Reject
from asyncrl.algorithms.corrections.truncate import Truncate
from asyncrl.algorithms.corrections.veto import Veto
from asyncrl.algorithms.corrections.zero_variance import ZeroVariance
from asyncrl.algorithms.global_threshold import draw, order, threshold, top
from asyncrl.algorithms.log_ratios import at_level
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.errors import ConfigError
from tests.algorithms.support import (
    alone,
    make_algorithm,
    make_episodes,
    make_tokens,
    on_ranks,
    random_batch,
    totals_of,
)

LOG2 = math.log(2)
TOKENS = make_tokens([[0, 1, 1, 0, 1], [1, 1]])
"""Turns of 2, 1 and 2 tokens in two sequences."""


def make_ages(log_w: list[float], **changes) -> Ages:
    values = torch.tensor(log_w, dtype=torch.float64)
    return replace(Ages(PolicyTokens.of(TOKENS), values, torch.ones_like(values), reduce=alone), **changes)


AGES = make_ages([LOG2, LOG2, -LOG2, 0.0, -2 * LOG2])


def prepared(correction, episodes, tokens):
    return make_algorithm(correction=correction).prepare(episodes, tokens, alone)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [2, 2, 0.5, 1, 0.25]),
        ("turn", [4, 4, 0.5, 0.25, 0.25]),
        ("turn_geometric", [2, 2, 0.5, 0.5, 0.5]),
        ("sequence", [2, 2, 2, 0.25, 0.25]),
        ("geometric", [2 ** (1 / 3)] * 3 + [0.5] * 2),
    ],
)
def test_a_level_says_what_one_ratio_spans(level, expected):
    assert at_level(AGES.log_w, AGES.view, level).exp().tolist() == pytest.approx(expected)
    assert Truncate(level=level, cap=1.5).weigh(AGES).tolist() == pytest.approx([min(1.5, w) for w in expected])


def test_truncation_may_have_a_floor_too():
    assert Truncate(cap=1.5, floor=0.5).weigh(AGES).tolist() == pytest.approx([1.5, 1.5, 0.5, 1, 0.5])
    with pytest.raises(ConfigError, match=r"floor=2.0: it must be below cap=1.5"):
        Truncate(cap=1.5, floor=2.0)


def test_mask_keeps_weights_inside_the_bounds_and_drops_the_rest():
    left = AGES.after(0, Mask(low=0.5, high=1.5))
    assert left.rejected.tolist() == [1, 1, 0, 0, 1]
    assert left.weights.tolist() == pytest.approx([2, 2, 0.5, 1, 0.25])


def test_veto_drops_the_whole_sequence_for_one_token():
    assert Veto(threshold=0.3).keep(AGES).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("by", "over", "low", "high", "expected"),
    [
        ("k1", "token", -0.5, 0.8, [0, 0, 1, 1, 0]),
        ("k1", "sequence_sum", -1.0, 1.0, [1, 1, 1, 0, 0]),
        ("k2", "sequence_mean", -math.inf, 0.3, [1, 1, 1, 0, 0]),
        ("k3", "sequence_max", -math.inf, 0.4, [1, 1, 1, 0, 0]),
        ("k3", "token", -math.inf, 0.2, [0, 0, 1, 1, 0]),
        ("ratio", "sequence_max", -math.inf, 1.5, [0, 0, 0, 1, 1]),
        ("k2", "sequence_sum", 0.8, math.inf, [0, 0, 0, 1, 1]),
    ],
)
def test_reject_bounds_a_divergence(by, over, low, high, expected):
    """Token k1: -.69 -.69 .69 | 0 1.39; k2: .24 .24 .24 | 0 .96; k3: .31 .31 .19 | 0 .64."""
    assert Reject(by=by, over=over, low=low, high=high).keep(AGES).int().tolist() == expected


@pytest.mark.parametrize(
    ("over", "low", "high", "expected"),
    [
        ("token", -0.2, 0.2, [0, 0, 1, 1, 1]),
        ("token", -0.125, 0.3, [1, 1, 1, 1, 0]),
        ("turn_mean", -0.2, 0.2, [0, 0, 1, 1, 1]),
        ("turn_mean", -0.09, 0.3, [1, 1, 0, 1, 1]),
        ("sequence_mean", -0.08, 0.1, [0, 0, 0, 1, 1]),
        ("sequence_sum", -0.2, 0.5, [1, 1, 1, 1, 1]),
        ("sequence_max", -1.0, 0.2, [0, 0, 0, 1, 1]),
    ],
)
def test_reject_bounds_the_difference_of_the_probabilities(over, low, high, expected):
    """mu = 1/4, 1/4, 1/5 | 1/2, 1/5 and w = 2, 2, 1/2 | 1, 1/4: differences 1/4, 1/4, -1/10 | 0, -3/20. Turns have
    2, 1 and 2 tokens: means 1/4, -1/10 and -3/40. Sequences: sums 2/5 and -3/20, means 2/15 and -3/40."""
    mu = torch.tensor([0.25, 0.25, 0.2, 0.5, 0.2], dtype=torch.float64)
    ages = replace(AGES, behaviour=mu.log(), proximal=mu.log() + AGES.log_w)
    assert Reject(by="difference", over=over, low=low, high=high).keep(ages).int().tolist() == expected


def test_reject_sees_the_whole_difference_of_a_token_whose_ratio_is_clamped():
    """mu = exp(-50) and pi = 1/2: the ratio is clamped to exp(20), and the difference is 1/2 all the same."""
    episodes, tokens = make_episodes([1, 0], [0, 0]), make_tokens([[1], [1]])
    old = torch.tensor([-50, -LOG2], dtype=torch.float64)
    tokens = replace(tokens, behaviour=old, proximal=torch.full_like(old, -LOG2))
    rule = ("reject", {"by": "difference", "over": "token", "low": -0.2, "high": 0.2})
    assert prepared([rule], episodes, tokens).rejected.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("rule", "weights", "mean"),
    [
        # Without the last: 5.5 over 5 tokens.
        (Mask(low=0.3, high=math.inf), [2, 2, 0.5, 1], 1.1),
        (Truncate(), [2, 2, 0.5, 1, 0.25], 1.15),
        # Products 2 (of 2, 2, 1/2) and 1/4: over the two sequences (2 + 1/4) / 2. By token it would be 6.5 / 5.
        (Truncate(level="sequence"), [2, 2, 2, 0.25, 0.25], 1.125),
        # Cube root of 2 = 1.259921 and square root of 1/4: (1.259921 + 0.5) / 2.
        (Truncate(level="geometric"), [1.259921] * 3 + [0.5] * 2, 0.8799605),
        # Products 2 and 1/4; the second is below 1/2: (2 + 0) / 2.
        (Mask(level="sequence", low=0.5), [2, 2, 2], 1.0),
    ],
)
def test_normalise_makes_the_mean_weight_one_with_dropped_ones_at_zero_and_later_drops_change_nothing(
    rule, weights, mean
):
    ages = AGES.after(0, rule).after(1, Normalise())
    assert ages.weights[: len(weights)].tolist() == pytest.approx([weight / mean for weight in weights])
    assert torch.equal(ages.after(2, Veto(threshold=0.3)).weights, ages.weights)


def test_m2po_drops_the_largest_until_the_second_moment_is_small():
    ages = make_ages([0.1, -0.2, 0.3, -1.0, 2.0])
    # Means of the smallest 1, 2, ... squares: .01, .025, .0467, .285, 1.028.
    for tau, kept in ((0.04, [1, 1, 0, 0, 0]), (0.05, [1, 1, 1, 0, 0]), (0.3, [1, 1, 1, 1, 0]), (2.0, [1] * 5)):
        assert M2po(tau=tau).keep(ages).int().tolist() == kept


def test_m2po_may_drop_everything_and_keeps_ties_together():
    assert M2po(tau=0.01).keep(make_ages([0.5, -0.5, 0.5, 0.5, 0.6])).sum() == 0
    assert M2po(tau=0.2).keep(make_ages([0.1, -0.9, 0.9, 0.9, 0.9])).int().tolist() == [1, 0, 0, 0, 0]


def test_opsm_drops_bad_tokens_of_sequences_that_the_policy_has_left():
    log_policy = torch.tensor([-0.3, -0.3, 0.0, -0.05, -0.05], dtype=torch.float64)
    advantages = torch.tensor([-1.0, 0, 1, -1, -1], dtype=torch.float64)
    ages = make_ages([0.0] * 5, log_policy=log_policy, advantages=advantages)
    assert Opsm(delta=0.1).keep(ages).tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("proximal", ["auto", "recompute", "behaviour"])
@pytest.mark.parametrize("moved", [0.0, -0.05])
def test_opsm_compares_with_the_policy_that_sampled_whatever_the_proximal_policy_is(proximal, moved):
    """Two bad sequences: mean(log mu - log pi_theta) is .12 and .06 at the start of the step, with delta .1; an update
    that lowers each log-prob by .05 takes the second one over it, too."""
    behaviour = torch.full((4,), -1.0)
    start = behaviour - torch.tensor([0.14, 0.10, 0.06, 0.06])
    tokens = make_tokens([[1, 1], [1, 1]], behaviour=behaviour, proximal=start)
    algorithm = make_algorithm(proximal=proximal, correction=["opsm"], advantage="reinforce_pp_baseline", loss="gpg")
    tokens = algorithm.prepare(make_episodes([-1, -1], [0, 1]), tokens, alone)
    tokens = replace(tokens, advantages=torch.full((4,), -1.0))
    policy = (start + moved).requires_grad_()
    loss, sums = algorithm.loss(policy, tokens, totals_of(tokens))
    loss.backward()
    dropped = 2 if moved == 0 else 4
    assert sums["masked/opsm"].item() == dropped
    assert policy.grad.count_nonzero() == 4 - dropped


def test_zero_variance_drops_groups_that_say_nothing():
    episodes = make_episodes([1, 0.5], [0, 1])
    ages = make_ages([0.0] * 5, episodes=episodes)
    assert ZeroVariance().keep(ages).sum() == 0
    mixed = make_ages([0.0] * 5, episodes=make_episodes([1, 0.5], [0, 0]))
    assert ZeroVariance().keep(mixed).all()
    assert ZeroVariance(tolerance=0.5).keep(mixed).sum() == 0


def test_each_rule_has_its_own_bit_and_judges_every_token():
    ages = AGES.after(0, Mask(low=0.0, high=1.0)).after(1, Veto(threshold=0.3))
    assert ages.rejected.tolist() == [1, 1, 0, 2, 2]


@pytest.mark.parametrize("rule", [("truncate", {"cap": math.inf}), ("mask", {"low": 0.0, "high": math.inf})])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20)
def test_tis_and_icepop_without_bounds_are_plain_importance_sampling(rule, seed):
    episodes, tokens = random_batch(seed)
    result = prepared([rule], episodes, tokens)
    expected = torch.where(tokens.mask, (tokens.proximal - tokens.behaviour).exp(), 0)
    torch.testing.assert_close(result.weights, expected)
    assert result.rejected is None or result.rejected.count_nonzero() == 0


FLOATS = st.floats(-1024, 1024, width=32)


@pytest.mark.slow
@given(st.lists(FLOATS, min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 70))
@settings(deadline=None, max_examples=50)
def test_the_largest_values_are_the_same_for_any_number_of_ranks(numbers, ranks, count):
    values = torch.tensor(numbers)
    shares = values.tensor_split(ranks)
    found = torch.cat(on_ranks(ranks, lambda rank, reduce: top(shares[rank], count, reduce)))
    cut = values.sort(descending=True).values[min(count, len(numbers)) - 1]
    assert torch.equal(found, values >= cut)


@given(st.lists(st.floats(0, 10, width=32), min_size=1, max_size=60), st.floats(0.01, 20))
@settings(deadline=None, max_examples=25)
def test_the_cut_by_a_running_mean_is_exact(numbers, tau):
    values = torch.tensor(numbers)
    cut = threshold(values, lambda count, total: total >= tau * count, alone)
    ordered = sorted(numbers)
    kept = [x for x in set(ordered) if sum(y for y in ordered if y <= x) < tau * sum(y <= x for y in ordered)]
    expected = max(kept, default=-1.0)
    assert torch.equal(order(values) < cut, values <= expected)


def test_keys_rank_as_the_values_do():
    values = torch.tensor([-torch.inf, -2.0, -1e-40, -0.0, 0.0, 1e-40, 3.0, torch.inf])
    keys = order(values)
    assert (keys.diff() >= 0).all()
    assert keys[3] == keys[4]


def test_a_draw_is_uniform_and_depends_on_token_and_version_only():
    sequence, position = torch.arange(64).repeat_interleave(512), torch.arange(512).repeat(64)
    numbers = draw(sequence, position, 3)
    assert torch.equal(numbers[700:900], draw(sequence[700:900], position[700:900], 3))
    assert abs(numbers.mean().item() - 0.5) < 0.01
    assert torch.histc(numbers, 16, 0, 1).std() < 3 * (64 * 512 / 16) ** 0.5
    assert abs(torch.corrcoef(torch.stack([numbers, draw(sequence, position, 4)]))[0, 1].item()) < 0.03
    assert abs(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1].item()) < 0.03


def test_opsm_keeps_tokens_without_an_advantage_however_far_the_policy_has_left_them():
    """The rule drops what is worse than its group; a token with A = 0 keeps its entropy and its KL."""
    old = torch.full((4,), -1.0, dtype=torch.float64)
    tokens = make_tokens([[1], [1], [1], [1]], behaviour=old, proximal=old)
    # Rewards 1, 1 and 1, 0 in two groups: advantages 0, 0, 1/2 and -1/2.
    algorithm = make_algorithm(advantage="dr_grpo", correction=[("opsm", {"delta": 0.1})], entropy_weight=1.0)
    tokens = algorithm.prepare(make_episodes([1, 1, 1, 0], [0, 0, 1, 1]), tokens, alone)
    entropy = torch.ones(4, dtype=torch.float64, requires_grad=True)
    loss, sums = algorithm.loss(old - 1, tokens, totals_of(tokens), entropy)
    loss.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == [-0.25, -0.25, -0.25, 0.0]
    assert algorithm.summary(sums)["masked/opsm"] == 0.25


def test_m2po_drops_what_takes_the_mean_to_tau_itself():
    """The mean of the rest must be below tau: 0 is, and (0 + 1/4) / 2 = 1/8 is not."""
    ages = make_ages([0.0, 0.5, 8.0, 8.0, 8.0])
    assert M2po(tau=0.125).keep(ages).int().tolist() == [1, 0, 0, 0, 0]


def test_normalise_takes_its_mean_by_token_though_a_rule_between_rejects_whole_sequences():
    # Weights 2, 2, 1/2 | 1, 1/4. The veto drops the second sequence: 4.5 over 5 tokens.
    ages = AGES.after(0, Truncate()).after(1, Veto(threshold=0.3)).after(2, Normalise())
    assert ages.weights[:3].tolist() == pytest.approx([2 / 0.9, 2 / 0.9, 0.5 / 0.9])


def test_a_ratio_of_a_turn_or_a_sequence_is_clamped_as_that_of_a_token_is():
    """Log-ratios of 15 within +-20 each: the sums 30 and 45 are not, and float32 has no exp of 90."""
    ages = make_ages([15.0, 15, 15, -15, -15])
    assert at_level(ages.log_w, ages.view, "sequence").tolist() == [20, 20, 20, -20, -20]
    assert at_level(ages.log_w, ages.view, "turn").tolist() == [20, 20, 15, -20, -20]


def test_opsm_keeps_bad_sequences_that_the_policy_has_moved_towards():
    old = torch.full((2,), -1.0, dtype=torch.float64)
    tokens = make_tokens([[1], [1]], behaviour=old, proximal=old)
    algorithm = make_algorithm(advantage="dr_grpo", loss="gpg", correction=[("opsm", {"delta": 0.1})])
    tokens = algorithm.prepare(make_episodes([1, 0], [0, 0]), tokens, alone)
    _, sums = algorithm.loss(old + 0.5, tokens, totals_of(tokens))
    assert algorithm.summary(sums)["masked/opsm"] == 0
