from __future__ import annotations

import math
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages.gae import Gae
from asyncrl.algorithms.advantages.vtrace import Vtrace
from tests.algorithms.support import make_episodes, make_rollouts, make_tokens, random_batch

CAPS = st.sampled_from([0.3, 1.0, 2.0, math.inf])


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1), CAPS, CAPS, CAPS)
@settings(max_examples=40, deadline=None)
def test_the_recursion_equals_the_definition_as_a_double_sum(seed, gamma, lam, rho_bar, c_bar, rho_pg_bar):
    episodes, tokens = random_batch(seed, drift=1.0)
    part = Vtrace(gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar, rho_pg_bar=rho_pg_bar, step_weight=1.0)
    rollouts = make_rollouts(episodes, tokens)
    estimate = part(rollouts)
    rewards, ratio, start = rollouts.rewards(1.0), rollouts.ratio, 0
    for length in rollouts.view.sequences.lengths.tolist():
        here = slice(start, start + length)
        r, w, v = rewards[here], ratio[here], rollouts.values[here]
        following = torch.cat([v[1:], torch.zeros(1, dtype=v.dtype)])
        delta = w.clamp(max=rho_bar) * (r + gamma * following - v)
        c = lam * w.clamp(max=c_bar)
        targets = torch.stack(
            [v[s] + sum(gamma ** (t - s) * c[s:t].prod() * delta[t] for t in range(s, length)) for s in range(length)]
        )
        after = torch.cat([targets[1:], torch.zeros(1, dtype=v.dtype)])
        advantages = w.clamp(max=rho_pg_bar) * (r + gamma * after - v)
        torch.testing.assert_close(estimate.returns[here], targets, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(estimate.advantages[here], advantages, rtol=1e-10, atol=1e-10)
        start += length


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_with_ratio_one_the_targets_are_n_step_returns(seed):
    episodes, tokens = random_batch(seed)
    rollouts = make_rollouts(episodes, replace(tokens, proximal=tokens.behaviour))
    estimate = Vtrace(gamma=0.9)(rollouts)
    monte_carlo = Gae(gamma=0.9, lam=1.0)(rollouts)
    torch.testing.assert_close(estimate.returns, monte_carlo.returns, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(estimate.advantages, monte_carlo.advantages, rtol=1e-10, atol=1e-10)


def test_with_ratio_zero_the_values_stay_and_advantages_vanish():
    values = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    old = torch.zeros(3, dtype=torch.float64)
    tokens = make_tokens([[1, 1, 1]], values=values, behaviour=old, proximal=old - 1000)
    estimate = Vtrace()(make_rollouts(make_episodes([1], [0]), tokens))
    # The log-ratio is clamped to -20, so "zero" is exp(-20).
    torch.testing.assert_close(estimate.returns, values, rtol=0, atol=2e-8)
    torch.testing.assert_close(estimate.advantages, torch.zeros_like(values), rtol=0, atol=2e-8)
