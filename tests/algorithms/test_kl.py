from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck

from asyncrl.algorithms import registry
from asyncrl.algorithms.kl import K3
from tests.algorithms.support import alone, make_algorithm, make_episodes, make_tokens, totals_of

FORMS = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: min(math.exp(-d) + d - 1, 10),
}
D = [0.5, -1.0, 2.0]


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def estimate(name: str, d: list[float]) -> tuple[list[float], list[float]]:
    logprobs = torch.tensor(d, dtype=torch.float64).sub(1).requires_grad_()
    values = registry.build("kl", name, {})(logprobs, torch.full((len(d),), -1.0, dtype=torch.float64))
    values.sum().backward()
    return values.tolist(), logprobs.grad.tolist()


@pytest.mark.parametrize("name", FORMS)
def test_each_form_has_its_value_and_its_own_gradient(name):
    assert estimate(name, D)[0] == pytest.approx([FORMS[name](d) for d in D])
    reference = torch.zeros(3, dtype=torch.float64)
    form = registry.build("kl", name, {})
    assert gradcheck(lambda d: form(d, reference), (torch.tensor(D, dtype=torch.float64, requires_grad=True),))


@pytest.mark.parametrize("name", FORMS)
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(name):
    values, gradients = estimate(f"{name}+", D)
    assert values == pytest.approx([FORMS[name](d) for d in D])
    assert gradients == pytest.approx(D)


@pytest.mark.parametrize("name", [*FORMS, *(f"{name}+" for name in FORMS)])
def test_the_difference_is_clamped_to_ten_without_gradient_beyond(name):
    base = name.removesuffix("+")
    values, gradients = estimate(name, [1000.0, -1000.0])
    assert values == pytest.approx([FORMS[base](10), FORMS[base](-10)])
    assert gradients == [0, 0]


def test_k3_is_capped_without_gradient_beyond_and_k3_plus_keeps_that_of_k2():
    # d = -2: e^2 - 2 - 1 = 4.38906, gradient 1 - e^2 = -6.38906. d = -3: e^3 - 3 - 1 = 16.08554, above the cap.
    values, gradients = estimate("k3", [-2.0, -3.0])
    assert values == pytest.approx([4.38906, 10], abs=5e-6)
    assert gradients == pytest.approx([-6.38906, 0], abs=5e-6)
    assert estimate("k3+", [-3.0]) == ([10], [-3])
    assert [K3(cap=cap)(doubles(-3), doubles(0)).item() for cap in (12.0, math.inf)] == pytest.approx([12, 16.085537])


def test_none_costs_nothing():
    assert not make_algorithm().needs_reference


def test_k3_weighted_by_the_whole_ratio_has_the_gradient_of_the_kl_on_old_data():
    # pi = (theta, 1 - theta) over two tokens, sampled from mu = (1/2, 1/2): the mean over mu of w k3 is the KL to
    # pi_ref = (.3, .7) = .6 log(.6 / .3) + .4 log(.4 / .7), and its derivative log(.6 / .3) - log(.4 / .7).
    theta = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    half = doubles(0.5, 0.5).log()
    tokens = make_tokens([[1], [1]], behaviour=half, proximal=half, reference=doubles(0.3, 0.7).log())
    algorithm = make_algorithm(kl=("k3", {"weight": 1.0, "importance_weighted": True}), correction=[])
    tokens = algorithm.prepare(make_episodes([1, 1], [0, 0]), tokens, alone)
    loss, _ = algorithm.loss(torch.stack([theta, 1 - theta]).log(), tokens, totals_of(tokens))
    loss.backward()
    assert loss.item() == pytest.approx(0.6 * math.log(2) + 0.4 * math.log(4 / 7))
    assert theta.grad.item() == pytest.approx(math.log(2) - math.log(4 / 7))


@pytest.mark.parametrize("name", ["k1", "k1+", "k2", "k2+", "k3", "k3+"])
def test_forms_weighted_by_the_ratio_have_the_gradient_of_the_kl_on_old_data(name):
    # As above with other numbers, straight from the definition: each token weighs mu, and the form with it pi / mu.
    logits, reference = doubles(0.3, -0.5, 0.1).requires_grad_(), doubles(0.2, 0.5, 0.3).log()
    policy, behaviour = logits.log_softmax(0), doubles(0.5, 0.1, 0.4).log()
    form = registry.build("kl", name, {"importance_weighted": True})
    (gradient,) = torch.autograd.grad((behaviour.exp() * form.weighted(policy, reference, behaviour)).sum(), logits)
    (expected,) = torch.autograd.grad((logits.softmax(0) * (logits.log_softmax(0) - reference)).sum(), logits)
    assert gradient.tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("cap", [10.0, math.inf])
def test_k3_weighted_by_the_ratio_never_pushes_a_token_away_from_the_reference(cap):
    # The gradient of the KL by a token's log-prob is w d. It is left out where k3 is capped, or d is -10 or less.
    d = doubles(-12, -10, -5, -3, -2.5, -1, 0.5, 3)
    policy = torch.full_like(d, -8).requires_grad_()
    form, behaviour = K3(cap=cap, importance_weighted=True), torch.full_like(d, -8.5)
    result = form.weighted(policy, policy.detach() - d, behaviour)
    (gradient,) = torch.autograd.grad(result.sum(), policy)
    weight = math.exp(0.5)
    left_out = 4 if cap == 10 else 2
    expected = [0.0] * left_out + [weight * each for each in d.tolist()[left_out:]]
    assert gradient.tolist() == pytest.approx(expected)
    assert result.tolist() == pytest.approx([weight * each for each in form.form(d.clamp(-10, 10)).tolist()])


def charged(place: str, advantage: str = "dr_grpo", **changes):
    """Two episodes of rewards 1 and 0; d = log pi - log ref is .2 and .4 on the first one's tokens, .6 on the other's,
    and 9 on a tool's token, which counts nowhere."""
    old = doubles(-1, -5, -2, -1)
    tokens = make_tokens([[1, 0, 1], [1]], behaviour=old, proximal=old, reference=old - doubles(0.2, 9, 0.4, 0.6))
    algorithm = make_algorithm(
        kl=("k1", {"weight": 0.5, "place": place, **changes}), correction=[], advantage=advantage
    )
    return algorithm, make_episodes([1, 0], [0, 0]), tokens


def test_kl_in_the_reward_is_taken_from_it_before_the_group_is_compared():
    # Rewards 1 - (.2 + .4)/2 = .7 and 0 - .6/2 = -.3; mean .2: advantages +-1/2.
    algorithm, episodes, tokens = charged("reward")
    assert algorithm.prepare(episodes, tokens, alone).advantages.tolist() == pytest.approx([0.5, 0, 0.5, -0.5])
    # With k2: .02 + .08 = .1 and .18, halved: .95 and -.09; half of their difference 1.04.
    algorithm = make_algorithm(kl=("k2", {"weight": 0.5, "place": "reward"}), correction=[], advantage="dr_grpo")
    assert algorithm.prepare(episodes, tokens, alone).advantages.tolist() == pytest.approx([0.52, 0, 0.52, -0.52])


def test_an_adaptive_coefficient_grows_by_the_clamped_error_times_the_sequences_over_the_horizon():
    # KL a token (.2 + .4 + .6) / 3 = .4. Target .1: error 3, clamped to .2: 1/2 (1 + .2 * 2 / 4) = .55.
    algorithm, episodes, tokens = charged("reward", target=0.1, horizon=4)
    weights = []
    for _ in range(3):
        algorithm.prepare(episodes, tokens, alone)
        weights.append(algorithm.kl_weight)
    assert weights == pytest.approx([0.5, 0.55, 0.605])


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_a_batch_is_charged_with_the_coefficient_that_the_batch_before_left(place):
    # KL of the episodes: .2 + .4 and .1. The first batch is charged 1/2 of it: 1 - .3 and 0 - .05, half the difference
    # .375; the second 11/20 of it, since (.2 + .4 + .1) / 3 is more than 1.2 times the target.
    algorithm, episodes, tokens = charged(place, target=0.1, horizon=4)
    tokens = replace(tokens, reference=tokens.proximal - doubles(0.2, 9, 0.4, 0.1))
    for weight in (0.5, 0.55):
        prepared = algorithm.prepare(episodes, tokens, alone)
        _, sums = algorithm.loss(tokens.proximal, prepared, totals_of(tokens))
        if place == "reward":
            half = (1 - weight * 0.5) / 2
            assert prepared.advantages.tolist() == pytest.approx([half, 0, half, -half])
        else:
            assert sums["loss/kl"].item() == pytest.approx(weight * 0.7 / 3)
        assert algorithm.summary(sums)["kl_reference/weight"] == pytest.approx(weight)


def test_an_adaptive_coefficient_shrinks_below_its_target():
    # KL .4, target .44: error .4 / .44 - 1 = -1/11 within the clamp: 1/2 (1 - 1/11 * 2 / 4) = 1/2 * 21/22.
    algorithm, episodes, tokens = charged("loss", target=0.44, horizon=4)
    algorithm.prepare(episodes, tokens, alone)
    algorithm.prepare(episodes, tokens, alone)
    assert algorithm.kl_weight == pytest.approx(0.5 * 21 / 22)


def test_an_adaptive_coefficient_follows_the_kl_of_the_trained_tokens():
    algorithm, episodes, tokens = charged("reward", target=0.3, horizon=4)
    old = torch.zeros_like(tokens.mask)
    old[tokens.mask.nonzero()[-1]] = True
    algorithm.prepare(episodes, replace(tokens, old=old), alone)
    algorithm.prepare(episodes, tokens, alone)
    # (.2 + .4) / 2 is the target, while (.2 + .4 + .6) / 3 is a third above it.
    assert algorithm.kl_weight == pytest.approx(0.5)


def test_a_batch_without_trained_tokens_leaves_an_adaptive_coefficient_as_it_is():
    algorithm, episodes, tokens = charged("reward", target=0.3, horizon=4)
    for _ in range(2):
        algorithm.prepare(episodes, replace(tokens, old=tokens.mask.clone()), alone)
    assert algorithm.kl_weight == pytest.approx(0.5)


@pytest.mark.parametrize(("kl", "factor"), [(0.0, 0.8), (5.0, 1.2)])
def test_a_batch_of_many_horizons_changes_an_adaptive_coefficient_by_a_fifth_and_never_its_sign(kl, factor):
    # 512 sequences are 8 horizons: 1 - .2 * 8 would be negative, and so would be the next coefficient.
    form = K3(weight=0.1, target=0.1, horizon=64)
    assert form.adapted(0.1, kl, 512) == pytest.approx(0.1 * factor)


def test_in_the_loss_it_is_added_under_the_same_aggregation():
    # With an update of .2: (.4 + .6 + .8) / 3 = .6 a token, halved.
    algorithm, episodes, tokens = charged("loss")
    logprobs = (tokens.behaviour + 0.2).requires_grad_()
    loss, sums = algorithm.loss(logprobs, algorithm.prepare(episodes, tokens, alone), totals_of(tokens))
    assert sums["loss/kl"].item() == pytest.approx(0.3)
    assert loss.item() == pytest.approx((sums["loss/kl"] + sums["loss/policy"]).item())


def test_in_the_reward_token_estimators_pay_where_it_arises():
    algorithm, episodes, tokens = charged("reward", "reinforce_pp")
    result = algorithm.prepare(episodes, tokens, alone)
    assert result.returns.tolist() == pytest.approx([1 - 0.1 - 0.2, 0, 1 - 0.2, -0.3])


def test_an_adapted_coefficient_is_restored_and_reported():
    first, other = (charged("loss", target=0.1, horizon=4)[0] for _ in range(2))
    _, episodes, tokens = charged("loss")
    first.prepare(episodes, tokens, alone)
    other.restore(first.state())
    for algorithm in (first, other):
        prepared = algorithm.prepare(episodes, tokens, alone)
        _, sums = algorithm.loss(tokens.behaviour, prepared, totals_of(tokens))
        assert algorithm.summary(sums)["kl_reference/weight"] == algorithm.kl_weight == pytest.approx(0.55)
