"""The losses sat and sat_gspo: a clip that is narrower for tokens that the policy has moved away from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.global_threshold import quantile
from asyncrl.algorithms.losses.base import Candidates, Updates
from asyncrl.algorithms.losses.gspo import Gspo
from asyncrl.algorithms.losses.ppo import Ppo
from asyncrl.algorithms.losses.sat import Sat, SatGspo
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.errors import ConfigError
from tests.algorithms.support import (
    alone,
    make_algorithm,
    make_config,
    make_episodes,
    make_tokens,
    on_ranks,
    random_batch,
    rows,
    totals_of,
)

SEEDS = st.integers(0, 10_000)
MOVES = [0.1, -0.2, 0.3, -0.6]


def updates_of(start: list[float], moved: list[float], advantages: list[float], lengths: tuple[int, ...]) -> Updates:
    """Tokens sampled at the log-prob -1. The step began `start` away from it, and the policy is now `moved` away."""
    view = PolicyTokens.of(make_tokens([[1] * length for length in lengths]))
    old, start_, moved_, advantages_ = (
        torch.tensor(each, dtype=torch.float64) for each in ([-1.0] * len(start), start, moved, advantages)
    )
    return Updates(view, (old + moved_).requires_grad_(), old + start_, old, advantages_)


def chosen(loss: Sat, updates: Updates) -> Updates:
    """The updates with what the loss decides before them."""
    draw = torch.zeros_like(updates.advantages)
    candidates = Candidates(updates.view, updates.proximal, updates.behaviour, updates.advantages, draw, alone)
    return replace(updates, selected=loss.select(candidates))


def computed(loss: Sat | Ppo | Gspo, updates: Updates) -> tuple[Tensor, Tensor]:
    """The losses of the tokens, and the gradient of their sum."""
    losses = loss(updates).losses
    (gradient,) = torch.autograd.grad(losses.sum(), updates.logprobs)
    return losses.detach(), gradient


def test_tokens_beyond_the_quantile_keep_a_share_of_the_clip_on_the_side_to_which_they_moved():
    """q = .2 is the median, which half of the tokens do not exceed. c = 1 / (1 + 1.5^2) = 4/13 and 1 / (1 + 3^2)."""
    loss = Sat(quantile=0.5, clip_low=0.2, clip_high=0.4)
    updates = chosen(loss, updates_of(MOVES, MOVES, [1, -1, 1, -1], (2, 2)))
    assert updates.selected.tolist() == pytest.approx([1, 1, 4 / 13, 0.1])
    losses, gradient = computed(loss, updates)
    # The ratios are 1.105, .819, 1.350 and .549. PPO would clip the third at 1.4 and the others at .8.
    assert losses.tolist() == pytest.approx([-1.105171, 0.818731, -(1 + 0.4 * 4 / 13), 0.98], abs=1e-6)
    assert gradient.tolist() == pytest.approx([-1.105171, 0.818731, 0, 0], abs=1e-6)
    marks = {name: mark.tolist() for name, mark in loss(updates).marks.items()}
    assert marks["stale"] == [False, False, True, True]
    assert marks["high"] == [False, False, True, False]
    assert marks["low"] == [False, False, False, True]


def test_an_update_that_brings_a_token_back_is_never_clipped():
    loss = Sat(quantile=0.5)
    updates = chosen(loss, updates_of(MOVES, MOVES, [-1, 1, -1, 1], (4,)))
    losses, gradient = computed(loss, updates)
    ratio = torch.tensor(MOVES, dtype=torch.float64).exp()
    torch.testing.assert_close(losses, -ratio * updates.advantages)
    torch.testing.assert_close(gradient, losses)


def test_the_clip_of_a_step_stays_as_it_began_while_the_ratio_follows_the_policy():
    loss = Sat(quantile=0.5, clip_low=0.2, clip_high=0.4)
    later = chosen(loss, updates_of(MOVES, [0.1, -0.2, 0.05, -0.01], [1, -1, 1, -1], (4,)))
    assert later.selected.tolist() == pytest.approx([1, 1, 4 / 13, 0.1])
    losses, _ = computed(loss, later)
    assert losses[2:].tolist() == pytest.approx([-1.051271, 0.990050], abs=1e-6)


def test_sat_gspo_compares_the_mean_over_the_sequence():
    """Means .2, -.4 and .0; the median of their absolute values over 6 tokens is .2, so only the second is beyond."""
    start = [0.1, 0.3, -0.4, -0.4, 0.1, -0.1]
    loss = SatGspo(quantile=0.5, clip_low=0.2, clip_high=0.2)
    updates = chosen(loss, updates_of(start, start, [1, 1, -1, -1, 1, 1], (2, 2, 2)))
    assert updates.selected.tolist() == pytest.approx([1, 1, 0.2, 0.2, 1, 1])
    losses, gradient = computed(loss, updates)
    assert losses.tolist() == pytest.approx([-1.2, -1.2, 0.96, 0.96, -1, -1])
    assert gradient.tolist() == pytest.approx([0, 0, 0, 0, -1, -1])


@given(SEEDS, st.sampled_from([Sat, SatGspo]), st.floats(0.05, 0.99))
@settings(max_examples=30, deadline=None)
def test_the_loss_is_never_below_that_of_the_whole_clip_and_equals_it_within_the_quantile(seed, kind, share):
    """PPO's surrogate around the behaviour policy is what remains if nothing is contracted."""
    generator = torch.Generator().manual_seed(seed)
    start, more, advantages = torch.randn(3, 12, generator=generator, dtype=torch.float64).tolist()
    start, more = [0.3 * each for each in start], [0.1 * each for each in more]
    moved = [one + other for one, other in zip(start, more, strict=True)]
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    loss, whole = kind(quantile=share, **bounds), (Ppo if kind is Sat else Gspo)(**bounds)
    updates = chosen(loss, updates_of(start, moved, advantages, (3, 4, 5)))
    assert ((updates.selected > 0) & (updates.selected <= 1)).all()
    assert (updates.selected < 1).count_nonzero() <= (1 - share) * 12 + 1e-9
    around = replace(updates, proximal=updates.behaviour)
    (losses, gradient), (loose, loose_gradient) = computed(loss, updates), computed(whole, around)
    assert (losses >= loose - 1e-12).all()
    kept = updates.selected == 1
    torch.testing.assert_close(losses[kept], loose[kept])
    torch.testing.assert_close(gradient[kept], loose_gradient[kept])


@pytest.mark.parametrize("kind", [Sat, SatGspo])
def test_data_of_the_policy_itself_have_the_whole_clip(kind):
    updates = chosen(kind(), updates_of([0.0] * 4, [0.1, -0.3, 0.2, 0.0], [1, -1, 2, 1], (2, 2)))
    assert updates.selected.tolist() == [1] * 4
    assert chosen(kind(), updates_of([0.0] * 3 + [1.0], MOVES, [1] * 4, (4,))).selected[:3].tolist() == [1] * 3


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40), st.integers(1, 3), st.floats(0.01, 0.99))
def test_the_quantile_is_the_smallest_value_with_that_share_of_the_values_up_to_it_for_any_number_of_ranks(
    values, ranks, share
):
    expected = next(each for each in sorted(values) if sum(v <= each for v in values) >= share * len(values))
    found = on_ranks(ranks, lambda rank, reduce: quantile(torch.tensor(values[rank::ranks]), share, reduce))
    assert found == [expected] * ranks


def test_the_quantile_of_nothing_is_0_and_negative_values_count():
    assert quantile(torch.tensor([]), 0.9, alone) == 0
    assert quantile(torch.tensor([-2.0, 0.5, -3.0]), 0.5, alone) == -2


@given(SEEDS)
@settings(max_examples=10, deadline=None)
def test_a_step_fixes_the_clip_from_all_its_tokens_whatever_the_split(seed):
    episodes, tokens = random_batch(seed)
    algorithm = make_algorithm(loss=("sat", {"quantile": 0.7}), correction=[])
    whole = algorithm.prepare(episodes, tokens, alone)
    logprobs = tokens.behaviour + 0.2
    totals = totals_of(tokens, episodes)
    loss, sums = algorithm.loss(logprobs, whole, totals)
    assert sums["clip/stale"] == ((whole.selected < 1) & whole.mask).count_nonzero()
    parts = [rows(tokens, [member]) for member in range(episodes.count)]
    split = [algorithm.loss(logprobs[place], whole.select(place), totals)[0] for place in parts]
    assert float(sum(split)) == pytest.approx(float(loss), abs=1e-12)


def test_sat_needs_the_log_probs_of_the_start_of_the_step_and_its_own_ratio():
    assert Algorithm.from_config(make_config(loss="sat", correction=[])).needs_proximal
    for changes, message in (
        ({"correction": ["truncate"]}, r"algorithm.loss=sat accounts for mu itself: set algorithm.correction=\[\]"),
        ({"correction": [], "proximal": "behaviour"}, r"so sat would do nothing: set algorithm.proximal=recompute"),
        ({"correction": [], "proximal": "interpolate"}, r"and sat needs it before the updates"),
    ):
        with pytest.raises(ConfigError, match=message):
            Algorithm.from_config(make_config(loss="sat", **changes))
    with pytest.raises(ConfigError, match=r"sat_gspo has one ratio a sequence.*reject"):
        make_algorithm(loss="sat_gspo", correction=[("reject", {"over": "token", "high": 1.0})])


def test_a_batch_without_policy_tokens_is_zero():
    tokens = make_tokens([[0, 0]])
    algorithm = make_algorithm(loss="sat", correction=[], advantage="dr_grpo")
    prepared = algorithm.prepare(make_episodes([1], [0]), tokens, alone)
    loss, _ = algorithm.loss(tokens.behaviour.clone().requires_grad_(), prepared, totals_of(tokens))
    assert loss.item() == 0
