"""The correction kpop: a bound on the binary KL in both directions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.algorithms.corrections.base import Ages
from asyncrl.algorithms.corrections.kpop import Kpop
from asyncrl.algorithms.corrections.truncate import Truncate
from asyncrl.algorithms.divergences import binary_kl
from asyncrl.algorithms.policy_tokens import PolicyTokens
from tests.algorithms.support import alone, make_algorithm, make_tokens, random_batch

PROBABILITIES = st.floats(1e-4, 0.999)


def ages_of(proximal: list[float], behaviour: list[float], dtype: torch.dtype = torch.float64) -> Ages:
    """One sequence whose tokens have these probabilities under both policies."""
    prox, mu = (torch.tensor(each, dtype=dtype).log() for each in (proximal, behaviour))
    view = PolicyTokens.of(make_tokens([[1] * len(prox)]))
    return Ages(view, (prox - mu).clamp(-20, 20), torch.ones_like(mu), behaviour=mu, proximal=prox)


@pytest.mark.parametrize(("phi", "kept"), [(0.13, False), (0.14, False), (0.15, True)])
def test_both_directions_must_be_within_phi(phi, kept):
    """D(1/2, 1/4) = log 2 - log 3 / 2 = .1438 and D(1/4, 1/2) = 3/4 log 3 - log 2 = .1308."""
    for proximal, behaviour in ((0.5, 0.25), (0.25, 0.5)):
        ages = ages_of([proximal], [behaviour])
        assert Kpop(phi=phi).keep(ages).tolist() == [kept]
        assert Kpop(phi=phi).weigh(ages).tolist() == pytest.approx([proximal / behaviour])


def test_a_rare_token_may_have_a_large_ratio_and_a_likely_one_may_not_have_a_small_one():
    """D(.004, .001) = .00255 at the ratio 4, and D(.8, .99) = .429 at the ratio .81."""
    ages = ages_of([0.004, 0.8], [0.001, 0.99])
    assert Kpop().keep(ages).tolist() == [True, False]
    divergence = binary_kl(ages.proximal.exp(), ages.behaviour.exp())
    assert divergence.tolist() == pytest.approx([0.002549, 0.428672], abs=1e-6)


@given(PROBABILITIES, PROBABILITIES, st.floats(0.01, 1))
def test_the_bound_treats_both_policies_alike_and_a_larger_phi_keeps_more(one, other, phi):
    keep = [bool(Kpop(phi=phi).keep(ages_of(*each))) for each in (([one], [other]), ([other], [one]))]
    assert keep[0] == keep[1]
    assert bool(Kpop(phi=2 * phi).keep(ages_of([one], [other]))) or not keep[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_prob", [0.0, -1e-9, -60.0, -1e4])
def test_probabilities_of_0_and_1_have_finite_divergences(dtype, log_prob):
    edge, half = torch.tensor([log_prob], dtype=dtype).exp(), torch.tensor([0.5], dtype=dtype)
    assert binary_kl(edge, half).isfinite().all()
    assert binary_kl(half, edge).isfinite().all()
    assert binary_kl(edge, edge).tolist() == [0]


@given(st.integers(0, 10_000))
def test_data_of_the_policy_itself_are_all_kept_with_weight_one_and_a_large_phi_is_importance_sampling(seed):
    episodes, tokens = random_batch(seed)
    kpop = make_algorithm(correction=[("kpop", {"phi": 50.0})]).prepare(episodes, tokens, alone)
    view = PolicyTokens.of(tokens)
    log_w = (tokens.proximal - tokens.behaviour).clamp(-20, 20)
    plain = view.scatter(Truncate(cap=math.inf).weigh(Ages(view, view.take(log_w), view.take(log_w))))
    assert kpop.rejected.count_nonzero() == 0
    torch.testing.assert_close(kpop.weights, plain)
    same = ages_of([0.3, 0.9], [0.3, 0.9])
    assert Kpop(phi=1e-6).keep(same).all()
    assert Kpop(phi=1e-6).weigh(same).tolist() == [1, 1]
