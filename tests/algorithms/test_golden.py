"""The numbers that every implementation of these formulas must give."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.algorithms.advantages.grpo import Grpo
from asyncrl.algorithms.advantages.grpo_passk import GrpoPassk
from asyncrl.algorithms.advantages.maxrl import MaxRl
from asyncrl.algorithms.advantages.pure import min_form
from asyncrl.algorithms.advantages.rloo import Rloo
from asyncrl.algorithms.batch import Totals
from asyncrl.algorithms.losses.ppo import Ppo
from asyncrl.algorithms.registry import build
from asyncrl.algorithms.view import View
from tests.algorithms.support import (
    alone,
    make_algorithm,
    make_episodes,
    make_rollouts,
    make_tokens,
    make_updates,
)

ROOT_HALF = math.sqrt(0.5)
FOUR = make_episodes([1, 0, 0.5, 1], [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("token-mean", {}, 3.0),
        ("token-sum", {}, 15.0),
        ("seq-mean-token-sum", {}, 7.5),
        ("seq-mean-token-mean", {}, 2.75),
        ("seq-mean-token-sum-norm", {"norm": 3}, 2.5),
    ],
)
def test_each_aggregation_gives_its_number(name, params, expected):
    view = View.of(make_tokens([[1, 1, 0], [1, 1, 1]]))
    losses = view.take(torch.tensor([1.0, 2, 9, 3, 4, 5]))
    result = build("aggregation", name, params)(losses, view.sequences, view.sequences.lengths, Totals(5, 2))
    assert result.item() == pytest.approx(expected, abs=1e-12)


def test_group_estimators_on_two_groups_of_two():
    assert Grpo().scores(FOUR).tolist() == pytest.approx([ROOT_HALF, -ROOT_HALF, -ROOT_HALF, ROOT_HALF], abs=2e-6)
    assert Rloo().scores(FOUR).tolist() == [1, -1, -0.5, 0.5]
    assert GrpoPassk().scores(FOUR).tolist() == pytest.approx([1.4142, 0, 0, 1.4142], abs=1e-4)


def test_leave_one_out_and_maxrl_with_one_success_among_four():
    one = make_episodes([1, 0, 0, 0], [0, 0, 0, 0])
    assert Rloo().scores(one).tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert MaxRl().scores(one).tolist() == pytest.approx([3, -1, -1, -1])
    assert MaxRl().scores(make_episodes([0, 0], [0, 0])).tolist() == [0, 0]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "maxrl", "grpo_passk"])
def test_in_uneven_groups_a_group_of_equal_rewards_gets_exactly_zero(name):
    reward = [0.1, 0.9, 0.3, 0.4, 5.0, 5.0, 5.0, 0.7, 0.2, 0.2, 0.1]
    episodes = make_episodes(reward, [0] * 4 + [1] * 3 + [2] * 4, lengths=torch.arange(1, 12))
    scores = build("advantage", name, {}).scores(episodes)
    assert scores[4:7].tolist() == [0, 0, 0]
    assert scores.count_nonzero() >= 2


def test_pure_credits_nearly_all_to_the_worst_step():
    scores = [0.8, 0.6, -0.4, 0.9]
    episodes = make_episodes([0], [0], steps=[(0, end, score) for end, score in enumerate(scores, 1)])
    credit = min_form(episodes, 0.1).flip(0).cumsum(0).flip(0)
    assert credit.tolist() == pytest.approx([-0.399944, -0.399949, -0.399976, 0.000002], abs=1e-6)
    tokens = make_tokens([[1, 1, 1, 1]])
    advantages = build("advantage", "pure", {"temperature": 0.1})(make_rollouts(episodes, tokens)).advantages
    assert torch.equal(advantages, credit)


def test_dual_clip_bounds_the_loss_of_a_bad_token_with_a_large_ratio():
    updates = make_updates([math.log(2), math.log(2), math.log(0.5)], [2, -2, 2])
    result = Ppo(dual_clip=1.5)(updates)
    assert result.losses.tolist() == pytest.approx([-2.4, 3, -1])
    assert [result.marks[name].tolist() for name in ("high", "dual")] == [[True, False, False], [False, True, False]]


def test_a_log_ratio_of_89_gives_a_finite_loss_and_gradient():
    for advantage in ([1.0, 0.0], [0.0, 1.0]):
        old = torch.full((2,), -90.0)
        tokens = make_tokens([[1], [1]], behaviour=old, proximal=old, reference=old)
        algorithm = make_algorithm(kl="k3")
        tokens = algorithm.prepare(make_episodes(advantage, [0, 0]), tokens, alone)
        logprobs = torch.full((2,), -1.0, requires_grad=True)
        loss, _ = algorithm.loss(logprobs, tokens, Totals(2, 2))
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(logprobs.grad).all()
