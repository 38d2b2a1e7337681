"""Values and gradients of the policy losses and of the critic's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck

from asyncrl.algorithms import registry
from asyncrl.algorithms.aggregation import SeqMeanTokenMean, TokenMean
from asyncrl.algorithms.batch import Totals
from asyncrl.algorithms.losses.base import Candidates, Updates
from asyncrl.algorithms.losses.cispo import Cispo
from asyncrl.algorithms.losses.clip_cov import ClipCov
from asyncrl.algorithms.losses.dppo import DppoKl, DppoTv
from asyncrl.algorithms.losses.dro import Dro
from asyncrl.algorithms.losses.gmpo import Gmpo
from asyncrl.algorithms.losses.gpg import Gpg
from asyncrl.algorithms.losses.gspo import Gspo
from asyncrl.algorithms.losses.implicit import implicit_loss, implicit_summary, pairwise_accuracy
from asyncrl.algorithms.losses.ipo import Ipo
from asyncrl.algorithms.losses.kl_cov import KlCov
from asyncrl.algorithms.losses.ppo import Ppo
from asyncrl.algorithms.losses.reinforce import Reinforce
from asyncrl.algorithms.losses.sapo import Sapo
from asyncrl.algorithms.losses.value import ClippedValue, HuberValue, value_loss
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.proximal import interpolated, interpolated_linearly
from asyncrl.errors import ConfigError, InvariantError
from tests.algorithms.my_parts import Absolute
from tests.algorithms.support import alone, make_tokens, make_updates, totals_of

LOG2, E = math.log(2), math.e


def gradient(loss, updates: Updates) -> list[float]:
    """d sum(losses) / d logprobs."""
    (result,) = torch.autograd.grad(loss(updates).losses.sum(), updates.logprobs)
    return result.tolist()


def selecting(updates: Updates, *flags: bool) -> Updates:
    return replace(updates, selected=torch.tensor(flags))


GATE = 1 / (1 + math.exp(-1))
EXAMPLES = {
    "ppo takes the pessimistic side, and its gradient stops at the clip": (
        Ppo(clip_low=0.2, clip_high=0.28),
        make_updates([LOG2, LOG2, -LOG2, -LOG2, 0.1], [1, -1, 1, -1, 2]),
        [-1.28, 2, -0.5, 0.8, -2 * math.exp(0.1)],
        [0, 2, -0.5, 0, -2 * math.exp(0.1)],
        {"high": [0], "low": [3]},
    ),
    "the dual clip bounds the loss of a bad token with a large ratio": (
        Ppo(dual_clip=1.5),
        make_updates([LOG2, LOG2, -LOG2], [2, -2, 2]),
        [-2.4, 3, -1],
        [0, 0, -1],
        {"high": [0], "low": [], "dual": [1]},
    ),
    "reinforce weighs by the whole ratio, cut at the cap": (
        Reinforce(cap=3.0),
        make_updates([LOG2, 2.0, -LOG2], [1, 1, -3]),
        [-2 * (LOG2 - 1), -3 * 1.0, 1.5 * (-LOG2 - 1)],
        [-2, -3, 1.5],
        {"high": [1]},
    ),
    "gspo gives every token the sequence's ratio and its own gradient": (
        Gspo(clip_low=1.0, clip_high=10.0),
        make_updates([0.2, 0.4, 0.6], [1.0, 1.0, -2.0], [2, 1]),
        [-math.exp(0.3), -math.exp(0.3), 2 * math.exp(0.6)],
        [-math.exp(0.3), -math.exp(0.3), 2 * math.exp(0.6)],
        {"high": [], "low": []},
    ),
    "gspo clips whole sequences": (
        Gspo(clip_low=0.1, clip_high=0.1),
        make_updates([0.5, -0.1, 0.0], [1.0, 1.0, 1.0], [2, 1]),
        [-1.1, -1.1, -1],
        [0, 0, -1],
        {"high": [0, 1], "low": []},
    ),
    "the dual clip of gspo bounds whole sequences": (
        Gspo(clip_low=1.0, clip_high=10.0, dual_clip=1.5),
        make_updates([0.2, 0.4, 0.6], [1.0, 1.0, -2.0], [2, 1]),
        [-math.exp(0.3), -math.exp(0.3), 3],
        [-math.exp(0.3), -math.exp(0.3), 0],
        {"high": [], "low": [], "dual": [2]},
    ),
    "the dual clip of sapo bounds the gate": (
        Sapo(tau_pos=1.0, tau_neg=1.0, dual_clip=2.5),
        make_updates([LOG2, LOG2], [-1, 1]),
        [2.5, -4 * GATE],
        [0, -4 * GATE * (1 - GATE) * 2],
        {"dual": [0]},
    ),
    "reinforce may weigh whole sequences": (
        Reinforce(cap=3.0, level="sequence"),
        make_updates([LOG2, LOG2, -LOG2], [1, 1, -3], [2, 1]),
        [-3 * (LOG2 - 1), -3 * (LOG2 - 1), 1.5 * (-LOG2 - 1)],
        [-3, -3, 1.5],
        {"high": [0, 1]},
    ),
    # The sum over two tokens of a loss that each has one half of the sequence's gradient.
    "gmpo is the geometric mean of clipped ratios, with a gradient of one over the length": (
        Gmpo(clip_low=0.4, clip_high=0.4),
        make_updates([0.9, 0.1, -0.9, -0.1], [1, 1, -1, -1], [2, 2]),
        [-math.exp(0.25), -math.exp(0.25), math.exp(-0.25), math.exp(-0.25)],
        [0, -math.exp(0.25), 0, math.exp(-0.25)],
        {"high": [0], "low": [2]},
    ),
    "cispo weighs by the clipped ratio and keeps every gradient": (
        Cispo(clip_low=0.2, clip_high=0.2),
        make_updates([LOG2, -LOG2, 0.0], [1, 1, -2]),
        [-1.2 * (LOG2 - 1), -0.8 * (-LOG2 - 1), -2],
        [-1.2, -0.8, 2],
        {"high": [0], "low": [1]},
    ),
    "sapo has the policy gradient at ratio one, and fades away from it": (
        Sapo(tau_pos=1.0, tau_neg=1.05),
        make_updates([0.0, 0.0, LOG2], [1, -2, 1]),
        [-2, 4 / 1.05, -4 * GATE],
        [-1, 2, -4 * GATE * (1 - GATE) * 2],
        {},
    ),
    # mu = e^-1 = .368 everywhere; pi = .735, .735, .184, .184, .405.
    "dppo_tv drops the tokens that would move further away": (
        DppoTv(delta=0.15),
        make_updates([LOG2, LOG2, -LOG2, -LOG2, 0.1], [1, -1, 1, -1, 1]),
        [0, 2 * (LOG2 - 1), -0.5 * (-LOG2 - 1), 0, 0.9 * math.exp(0.1)],
        [0, 2, -0.5, 0, -math.exp(0.1)],
        {"high": [0], "low": [3]},
    ),
    "dppo may have another region where the advantage is negative": (
        DppoTv(delta=0.15, delta_low=0.2),
        make_updates([LOG2, -LOG2], [1, -1]),
        [0, 0.5 * (-LOG2 - 1)],
        [0, 0.5],
        {"high": [0], "low": []},
    ),
    "dppo cuts the weight of a rare token that became likely": (
        DppoTv(cap=20.0),
        make_updates([5.0], [-1.0]),
        [20 * 4.0],
        [20],
        {"high": [], "low": []},
    ),
    # mu = .368; pi = .735, .735, .184, .368: differences .368, .368, -.184, 0. s = 2, 2, 1/2, 1.
    # The pull adds 1/10 log^2 s, and 2/10 log s to the gradient, on every token.
    "ipo drops what is far on either side, whatever the advantage, and pulls back all": (
        Ipo(delta=0.2, pull=0.1),
        make_updates([LOG2, LOG2, -LOG2, 0.0], [1, -1, 3, -4]),
        [0.1 * LOG2**2, 0.1 * LOG2**2, -1.5 + 0.1 * LOG2**2, 4],
        [0.2 * LOG2, 0.2 * LOG2, -1.5 - 0.2 * LOG2, 4],
        {"high": [0, 1], "low": []},
    ),
    "ipo keeps the gradient of a weight at its cap": (
        Ipo(delta=0.9, cap=1.5),
        make_updates([LOG2, -LOG2], [1, -1]),
        [-1.5, 0.5],
        [-1.5, 0.5],
        {"high": [], "low": []},
    ),
    "gpg is the plain policy gradient": (Gpg(), make_updates([0.3, -0.2], [2, -1]), [1.4, -1.2], [-2, 1], {}),
    "dro pulls back by the log-ratio": (
        Dro(beta=0.5),
        make_updates([0.3], [2]),
        [-2 * (-0.7) + 0.25 * 0.09],
        [-2 + 0.5 * 0.3],
        {},
    ),
    "kl_cov penalises the tokens that it selected": (
        KlCov(weight=0.3),
        selecting(make_updates([0.5, -0.5], [1, 1]), True, False),
        [-math.exp(0.5) + 0.15, -math.exp(-0.5)],
        [-math.exp(0.5) + 0.3, -math.exp(-0.5)],
        {"covariance": [0]},
    ),
    "clip_cov takes out the tokens that it selected": (
        ClipCov(),
        selecting(make_updates([0.1, 0.1], [1, 1]), True, False),
        [0, -math.exp(0.1)],
        [0, -math.exp(0.1)],
        {"high": [], "low": [], "covariance": [0]},
    ),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_loss_has_its_values_gradients_and_marks(example):
    loss, updates, losses, gradients, marks = EXAMPLES[example]
    result = loss(updates)
    assert result.losses.tolist() == pytest.approx(losses)
    assert gradient(loss, updates) == pytest.approx(gradients)
    assert {name: mark.nonzero()[:, 0].tolist() for name, mark in result.marks.items()} == marks


def test_dppo_kl_drops_by_binary_kl():
    updates = make_updates([LOG2, -LOG2, 0.1], [1, -1, 1])
    mu = 1 / E
    divergence = [
        mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi)) for pi in (2 / E, 0.5 / E, math.exp(-0.9))
    ]
    between = (divergence[1] + divergence[2]) / 2
    assert gradient(DppoKl(delta=between), updates) == pytest.approx([0, 0, -math.exp(0.1)])
    assert gradient(DppoKl(delta=divergence[0] + 1e-9), updates) == pytest.approx([-2, 0.5, -math.exp(0.1)])


def make_candidates(**changes) -> Candidates:
    proximal = torch.tensor([-3.0, -1.0, -2.0, 0.0])
    values = {
        "view": PolicyTokens.of(make_tokens([[1] * 4])),
        "proximal": proximal,
        "behaviour": proximal,
        "advantages": torch.tensor([-2.0, 1.0, -1.0, 2.0]),
        "draw": torch.tensor([0.9, 0.1, 0.8, 0.2]),
        "reduce": alone,
    }
    return Candidates(**{**values, **changes})


def test_covariance_losses_choose_the_highest_or_a_random_token_within_the_band():
    # Covariances: 3, .5, .5, 3.
    assert KlCov(share=0.5).select(make_candidates()).tolist() == [True, False, False, True]
    chosen = ClipCov(share=0.25, cov_low=0.4, cov_high=1.0).select(make_candidates())
    assert chosen.tolist() == [False, False, True, False]


def test_covariance_losses_choose_at_least_one_token_and_none_outside_the_band():
    assert KlCov(share=1e-6).select(make_candidates(advantages=torch.tensor([0.0, 0, 0, 1]))).sum() == 1
    assert ClipCov(cov_low=50.0, cov_high=60.0).select(make_candidates()).sum() == 0


# The others stop gradients within their formula, so that no difference of values shows them: they are tested by value.
@pytest.mark.parametrize("name", ["clip_cov", "dro", "gmpo", "gpg", "kl_cov", "ppo", "sapo"])
def test_gradients_equal_finite_differences(name):
    updates = selecting(make_updates([0.31, -0.42, 0.17, 0.05], [1, -1.5, -0.5, 2], [2, 2]), True, False, False, True)
    loss = registry.build("loss", name, {})
    assert gradcheck(lambda logprobs: loss(replace(updates, logprobs=logprobs)).losses, (updates.logprobs,))


@pytest.mark.parametrize("name", sorted(registry.parts("loss")))
@pytest.mark.parametrize("log_ratio", [89.0, -89.0, 1000.0])
def test_extreme_ratios_give_finite_losses_and_gradients(name, log_ratio):
    old = torch.tensor([-0.5, -0.5])
    logprobs = (old + log_ratio).requires_grad_()
    updates = replace(make_updates([0, 0], [1, -1]), logprobs=logprobs, proximal=old, behaviour=old)
    updates = selecting(replace(updates, advantages=torch.tensor([1.0, -1.0])), True, False)
    loss = registry.build("loss", name, {})
    assert loss(updates).losses.isfinite().all()
    assert all(math.isfinite(each) for each in gradient(loss, updates))


def test_interpolation_goes_the_way_that_the_versions_went():
    behaviour, policy = torch.tensor([-2.0, -2.0, -2.0, -2.0]), torch.tensor([-1.0, -1.0, -1.0, -1.0])
    result = interpolated(behaviour, policy.requires_grad_(), torch.tensor([0, 1, 2, 4]))
    # v - v_b = 0, 1, 2, 4: alpha = 0, 0, 1/2, 3/4.
    assert result.tolist() == [-2, -2, -1.5, -1.25]
    assert not result.requires_grad


def test_linear_interpolation_goes_that_way_between_the_probabilities():
    behaviour, policy = torch.tensor([0.2, 0.2, 0.2]).log(), torch.tensor([0.4, 0.4, 0.4]).log()
    result = interpolated_linearly(behaviour, policy.requires_grad_(), torch.tensor([1, 2, 4]))
    assert result.exp().tolist() == pytest.approx([0.2, 0.3, 0.35])
    assert not result.requires_grad


def test_the_huber_loss_is_linear_beyond_delta():
    losses, clipped = HuberValue(delta=1.0)(torch.tensor([0.5, 3.0]), torch.zeros(2), torch.zeros(2))
    assert losses.tolist() == pytest.approx([0.125, 2.5])
    assert clipped.tolist() == [False, True]


def test_the_value_losses_of_sequences_may_weigh_the_same():
    tokens = make_tokens([[1, 1, 1], [1]], values=torch.zeros(4), returns=torch.tensor([1.0, 1.0, 1.0, 3.0]))
    loss, _ = value_loss(torch.zeros(4), tokens, Totals(4, 2), ClippedValue(clip=None), SeqMeanTokenMean())
    assert loss.item() == pytest.approx((0.5 + 4.5) / 2)


def test_the_value_loss_is_pessimistic_about_moves_away_from_the_old_value():
    old, returns = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, -1.0])
    values = torch.tensor([0.1, 0.9, 0.9])
    losses, clipped = ClippedValue(clip=0.2)(values, old, returns)
    assert losses.tolist() == pytest.approx([0.5 * 0.81, 0.5 * 0.64, 0.5 * 3.61])
    assert clipped.tolist() == [False, True, False]
    assert ClippedValue(clip=None)(values, old, returns)[0].tolist() == pytest.approx([0.405, 0.005, 1.805])


def test_the_value_loss_counts_policy_tokens_only_and_is_divided_by_the_global_count():
    tokens = make_tokens([[0, 1, 1]], values=torch.zeros(3), returns=torch.tensor([9.0, 1.0, 2.0]))
    values = torch.tensor([torch.nan, 0.1, 0.0], requires_grad=True)
    loss, sums = value_loss(values, tokens, Totals(4, 1), ClippedValue(), TokenMean())
    loss.backward()
    assert loss.item() == pytest.approx((0.81 + 4) / 2 / 4)
    assert values.grad.tolist() == pytest.approx([0, -0.9 / 4, -2 / 4])
    assert sums["value/tokens"] == 2


def test_a_value_loss_of_the_users_own_takes_its_place():
    tokens = make_tokens([[1, 1]], values=torch.zeros(2), returns=torch.tensor([1.0, -3.0]))
    loss, _ = value_loss(torch.zeros(2), tokens, Totals(2, 1), Absolute(), TokenMean())
    assert loss.item() == 2.0


def test_the_value_loss_without_returns_says_what_is_missing():
    with pytest.raises(InvariantError, match=r"needs tokens.values and tokens.returns"):
        value_loss(torch.zeros(2), make_tokens([[1, 1]]), Totals(2, 1), ClippedValue(), TokenMean())


def test_the_implicit_model_learns_the_outcome_from_the_sum_of_its_log_ratios():
    tokens = make_tokens([[0, 1, 1], [1, 1]])
    log_ratio = torch.tensor([torch.nan, 1.0, 2.0, -1.0, 0.0], requires_grad=True)
    loss, sums = implicit_loss(log_ratio, torch.tensor([1.0, 0.0]), tokens, Totals(4, 2), beta=0.5)
    loss.backward()
    assert implicit_summary(sums) == {"implicit/loss": pytest.approx(loss.item()), "implicit/accuracy": 1.0}
    assert implicit_summary({}) == {}
    sigmoid = [1 / (1 + math.exp(-1.5)), 1 / (1 + math.exp(0.5))]
    assert loss.item() == pytest.approx(-(math.log(sigmoid[0]) + math.log(1 - sigmoid[1])) / 2)
    first, second = (sigmoid[0] - 1) * 0.5 / 2, sigmoid[1] * 0.5 / 2
    assert log_ratio.grad.tolist() == pytest.approx([0, first, first, second, second])


def test_pairs_are_right_if_the_scores_are_in_the_order_of_the_outcomes():
    """Group 0 has outcomes 1, 1, 0 and scores 3, -1, 1: of its pairs apart, 3 > 1 is right and -1 < 1 is not: 1/2.
    Group 1 has outcomes 0, 1/2, 1 and scores 0, 0, 2, so weights 1/2, 1, 1/2 (first and second, first and third,
    second and third): a tie is half right, the others are: (1/4 + 1 + 1/2) / 2 = 7/8. Group 2 has one outcome: 1/2.
    The mean over the groups is 15/24."""
    scores = torch.tensor([3.0, -1, 1, 0, 0, 2, 5, 7], dtype=torch.float64)
    outcome, group = torch.tensor([1, 1, 0, 0, 0.5, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    assert pairwise_accuracy(scores, outcome, group) == pytest.approx(15 / 24)


def test_sapo_in_float64_has_its_sharpness_in_float64():
    """tau = 1.05 and r = 1 + 1e-3: the loss of A = -1 is 4 / 1.05 sigmoid(1.05e-3); float32 has 1.05 to 5e-8 only."""
    log_ratio = torch.tensor([math.log1p(1e-3)], dtype=torch.float64)
    zero = torch.zeros_like(log_ratio)
    view = PolicyTokens.of(make_tokens([[1]]))
    losses = Sapo(tau_neg=1.05)(Updates(view, log_ratio, zero, zero, torch.full_like(zero, -1.0))).losses
    assert losses.item() == pytest.approx(4 / 1.05 / (1 + math.exp(-1.05e-3)), rel=1e-13)


def test_a_dual_clip_that_would_leave_sapo_no_negative_token_is_refused():
    with pytest.raises(ConfigError, match=r"above 2 / tau_neg = 1\.905"):
        Sapo(dual_clip=1.9)
    Sapo(dual_clip=2.0)


def test_gspo_gives_a_token_the_gradient_of_its_own_advantage_alone():
    # One sequence whose log-ratios have the mean 0: the ratio is 1 on both tokens, and A is 1 and 0.
    updates = make_updates([0.1, -0.1], [1.0, 0.0])
    Gspo(clip_low=0.2, clip_high=0.2)(updates).losses.sum().backward()
    assert updates.logprobs.grad is not None
    assert updates.logprobs.grad.tolist() == pytest.approx([-1.0, 0.0])


def test_an_outcome_beyond_one_or_below_zero_is_the_nearer_end_for_the_implicit_model():
    tokens = make_tokens([[1], [1]])
    log_ratio = torch.tensor([0.3, -0.2], dtype=torch.float64)

    def loss(*outcome: float) -> float:
        scores = torch.tensor(outcome, dtype=torch.float64)
        return float(implicit_loss(log_ratio, scores, tokens, totals_of(tokens), 1.0)[0])

    assert loss(1.5, -0.5) == loss(1.0, 0.0)


def test_an_episode_without_policy_tokens_costs_the_implicit_model_nothing():
    # The second has none: the mean is the loss of the first, and its score of 0 is neither right nor wrong.
    tokens = make_tokens([[1], [0]])
    log_ratio = torch.tensor([1.0, 5.0], dtype=torch.float64)
    loss, sums = implicit_loss(log_ratio, torch.tensor([1.0, 1.0]), tokens, Totals(1, 1), beta=1.0)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-1)))
    assert implicit_summary(sums)["implicit/accuracy"] == 1


def test_gmpo_has_a_bound_of_its_own_on_each_side():
    bounded = Gmpo(clip_low=0.1, clip_high=0.3)
    assert bounded(make_updates([0.5], [1.0])).losses.item() == pytest.approx(-math.exp(0.3))
    assert bounded(make_updates([-0.5], [-1.0])).losses.item() == pytest.approx(math.exp(-0.1))


def test_kl_cov_draws_a_token_back_from_either_side():
    for log_ratio, pull in ((0.5, 1.0), (-0.5, -1.0)):
        updates = selecting(make_updates([log_ratio], [0.0]), True)
        assert KlCov(weight=2.0)(updates).losses.item() == pytest.approx(1.0)
        assert gradient(KlCov(weight=2.0), updates) == pytest.approx([2 * pull])


def test_the_huber_loss_becomes_linear_where_its_delta_says():
    errors = torch.tensor([1.0, -3.0])
    losses, far = HuberValue(delta=2.0)(errors, torch.zeros(2), torch.zeros(2))
    # 1/2, and 2 (3 - 1).
    assert losses.tolist() == [0.5, 4.0]
    assert far.tolist() == [False, True]
