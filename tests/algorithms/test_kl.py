from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from asyncrl.algorithms import registry
from asyncrl.algorithms.kl import K3
from asyncrl.algorithms.prepare import prepare
from tests.algorithms.support import alone, make_algorithm, make_episodes, make_tokens, totals_of

FORMS = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: min(math.exp(-d) + d - 1, 10),
}
D = [0.5, -1.0, 2.0]


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


def test_k3_is_capped_at_ten_with_no_gradient_beyond():
    # d = -2: e^2 - 2 - 1 = 4.38906, gradient 1 - e^2 = -6.38906. d = -3: e^3 - 3 - 1 = 16.08554, above the cap.
    values, gradients = estimate("k3", [-2.0, -3.0])
    assert values == pytest.approx([4.38906, 10], abs=5e-6)
    assert gradients == pytest.approx([-6.38906, 0], abs=5e-6)


def test_k3_plus_is_capped_in_its_value_and_keeps_the_gradient_of_k2():
    assert estimate("k3+", [-3.0]) == ([10], [-3])


def test_the_cap_of_k3_is_a_parameter_and_inf_takes_it_away():
    one, reference = torch.tensor([-3.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert K3(cap=12.0)(one, reference).tolist() == [12]
    assert K3(cap=math.inf)(one, reference).tolist() == pytest.approx([16.08554], abs=5e-6)


def test_none_costs_nothing():
    assert not make_algorithm().needs_reference


def charged(place: str, **changes):
    old = torch.tensor([-1.0, -2.0, -1.0, -3.0], dtype=torch.float64)
    reference = old - torch.tensor([0.1, 9.0, 0.3, 0.4])
    tokens = make_tokens([[1, 0, 1], [1]], behaviour=old, proximal=old, reference=reference)
    algorithm = make_algorithm(kl=("k1", {"weight": 0.5, "place": place}), correction=[], loss="gpg", **changes)
    return algorithm, make_episodes([1, 0], [0, 0]), tokens, old


def test_in_the_loss_it_is_added_under_the_same_aggregation():
    algorithm, episodes, tokens, old = charged("loss", advantage="dr_grpo")
    logprobs = (old + 0.2).requires_grad_()
    loss, sums = algorithm.loss(logprobs, algorithm.prepare(episodes, tokens, alone), totals_of(tokens))
    assert sums["loss/kl"].item() == pytest.approx(0.5 * (0.3 + 0.5 + 0.6) / 3)
    assert loss.item() == pytest.approx((sums["loss/kl"] + sums["loss/policy"]).item())


def test_in_the_reward_token_estimators_pay_where_it_arises():
    algorithm, episodes, tokens, _ = charged("reward", advantage="reinforce_pp")
    result = algorithm.prepare(episodes, tokens, alone)
    assert result.returns.tolist() == pytest.approx([1 - 0.05 - 0.15, 0, 1 - 0.15, -0.2])


def test_an_adapted_coefficient_is_used_kept_and_restored():
    algorithm, episodes, tokens, old = charged("loss")
    settings = {"kl": ("k1", {"weight": 0.5, "target": 0.1, "horizon": 10}), "correction": [], "loss": "gpg"}
    algorithm = make_algorithm(**settings)
    algorithm.prepare(episodes, tokens, alone)
    assert algorithm.kl_weight == pytest.approx(0.5 * (1 + 0.2 * 2 / 10))
    other = make_algorithm(**settings)
    other.restore(algorithm.state())
    assert other.kl_weight == algorithm.kl_weight
    _, expected = prepare(algorithm.parts, algorithm.kl_weight, episodes, tokens, alone)
    other.prepare(episodes, tokens, alone)
    assert other.kl_weight == expected
    prepared = other.prepare(episodes, tokens, alone)
    _, sums = other.loss(old, prepared, totals_of(tokens))
    assert other.summary(sums)["kl_reference/weight"] == other.kl_weight
