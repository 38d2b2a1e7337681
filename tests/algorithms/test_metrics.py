from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from asyncrl.algorithms.metrics import LAG_BINS, episode_metrics
from tests.algorithms.support import alone, make_algorithm, make_episodes, make_tokens, random_batch, totals_of

RATIOS = torch.tensor([1.0, 2.0, 0.5, 1.0, 4.0], dtype=torch.float64)


def summary(**changes):
    """Two sequences of 3 and 2 policy tokens with w = RATIOS, and an update by log r = .1 everywhere."""
    old = torch.full((6,), -1.0, dtype=torch.float64)
    tokens = make_tokens([[0, 1, 1, 1], [1, 1]], behaviour=old, versions=torch.tensor([-1, 4, 4, 3, 5, -20]))
    proximal = old.clone()
    proximal[tokens.mask] += RATIOS.log()
    tokens = replace(tokens, proximal=proximal)
    algorithm = make_algorithm(advantage="dr_grpo", **changes)
    episodes = make_episodes([1, 0], [0, 0], lengths=torch.tensor([3, 2]), version=5)
    prepared = algorithm.prepare(episodes, tokens, alone)
    _, sums = algorithm.loss(proximal + 0.1, prepared, totals_of(tokens), entropy=torch.full((6,), 2.0))
    return algorithm.summary(sums)


def test_the_mismatch_of_behaviour_and_proximal_policy():
    found = summary()
    w, logs = RATIOS, RATIOS.log()
    assert found["mismatch/ess"] == pytest.approx((w.sum() ** 2 / (5 * w.square().sum())).item())
    assert found["mismatch/kl"] == pytest.approx(-logs.mean().item())
    assert found["mismatch/k3"] == pytest.approx((w - 1 - logs).mean().item())
    assert found["mismatch/agree"] == (logs.abs() <= 1e-4).double().mean()
    assert found["mismatch/chi_square"] == pytest.approx(w.square().mean().item() - 1)
    perplexity = [(-logs[:3].mean()).exp().item(), (-logs[3:].mean()).exp().item()]
    assert found["mismatch/perplexity_ratio"] == pytest.approx(sum(perplexity) / 2)
    products = torch.stack([w[:3].prod(), w[3:].prod()])
    assert found["mismatch/chi_square_sequence"] == pytest.approx(products.square().mean().item() - 1)
    assert found["mismatch/behaviour_perplexity"] == pytest.approx(math.e)
    assert found["mismatch/proximal_perplexity"] == pytest.approx(math.e * sum(perplexity) / 2)


@pytest.mark.parametrize("bound", [-1e4, 1e4])
def test_ratios_at_their_bounds_have_finite_metrics(bound):
    episodes, tokens = random_batch(0, torch.float32)
    tokens = replace(tokens, proximal=tokens.behaviour + bound)
    algorithm = make_algorithm(advantage="dr_grpo", correction=[])
    prepared = algorithm.prepare(episodes, tokens, alone)
    _, sums = algorithm.loss(tokens.proximal, prepared, totals_of(tokens))
    found = algorithm.summary(sums, episodes)
    assert all(map(math.isfinite, found.values()))
    assert 0 <= found["mismatch/ess"] <= 1 + 1e-6


def test_the_update_and_the_weights_after_correction():
    found = summary(correction=[("mask", {"low": 0.6, "high": 3.0})])
    assert found["update/kl"] == pytest.approx(-0.1)
    assert found["update/k3"] == pytest.approx(torch.tensor(0.1, dtype=torch.float64).expm1().item() - 0.1)
    assert found["weight/mean"] == pytest.approx(4 / 3)
    assert found["weight/ess"] == pytest.approx(16 / (5 * 6))
    assert found["masked/mask"] == found["masked/any"] == pytest.approx(0.4)
    assert found["noop"] == 0


def test_advantages_entropy_clips_and_loss_terms():
    found = summary(correction=[], loss=("ppo", {"clip_low": 0.05, "clip_high": 0.05}), entropy_weight=0.5)
    assert found["advantage/mean"] == pytest.approx(0.1)
    assert found["advantage/std"] == pytest.approx((0.25 - 0.01) ** 0.5)
    assert found["advantage/positive"] == pytest.approx(0.6)
    assert found["clip/high"] == pytest.approx(0.6)
    assert found["clip/low"] == 0
    assert found["entropy"] == 2
    assert found["loss/entropy"] == pytest.approx(-1)


@pytest.mark.parametrize("offset", [0.1, 1e4])
def test_the_spread_of_advantages_and_returns_keeps_its_digits_far_from_zero(offset):
    values = offset + torch.tensor([1e-4, 3e-4, 7e-4, 2e-4], dtype=torch.float64)
    episodes = make_episodes(values.tolist(), [0, 0, 1, 1])
    tokens = make_tokens([[1]] * 4, values=torch.zeros(4, dtype=torch.float64))
    algorithm = make_algorithm(advantage=("gae", {"whiten": False}), correction=[])
    prepared = algorithm.prepare(episodes, tokens, alone)
    halves = [prepared.select(torch.tensor(half)) for half in ([0, 1], [2, 3])]
    found = [algorithm.loss(half.behaviour, half, totals_of(half))[1] for half in halves]
    summary = algorithm.summary({name: found[0][name] + found[1][name] for name in found[0]})
    assert summary["return/std"] == pytest.approx(float(values.std(correction=0)), rel=1e-9)
    assert summary["advantage/std"] == pytest.approx(float(values.std(correction=0)), rel=1e-9)


def test_equal_advantages_have_no_spread():
    episodes = make_episodes([0.1] * 7, [0] * 7)
    tokens = make_tokens([[1]] * 7, values=torch.zeros(7, dtype=torch.float64))
    algorithm = make_algorithm(advantage=("gae", {"whiten": False}), correction=[])
    prepared = algorithm.prepare(episodes, tokens, alone)
    _, sums = algorithm.loss(prepared.behaviour, prepared, totals_of(prepared))
    summary = algorithm.summary(sums)
    assert max(summary["advantage/std"], summary["return/std"]) < 1e-16


def test_lags_have_a_histogram_whose_last_bin_is_open():
    found = summary()
    assert {name: value for name, value in found.items() if name.startswith("token_lag/") and value} == {
        "token_lag/mean": pytest.approx((1 + 1 + 2 + 0 + 25) / 5),
        "token_lag/0": 0.2,
        "token_lag/1": 0.4,
        "token_lag/2": 0.2,
        f"token_lag/{LAG_BINS - 1}": 0.2,
    }


def test_loss_terms_are_means_over_the_minibatches_of_a_step():
    episodes = make_episodes([1, 0], [0, 0], lengths=torch.tensor([2, 2]))
    tokens = make_tokens([[1, 1], [1, 1]])
    algorithm = make_algorithm(advantage="dr_grpo", loss="gpg", correction=[])
    prepared = algorithm.prepare(episodes, tokens, alone)
    sums = {}
    for half in (torch.tensor([0, 1]), torch.tensor([2, 3])):
        part = prepared.select(half)
        _, found = algorithm.loss(torch.tensor([-1.0, -3.0]), part, totals_of(part))
        sums = {name: sums.get(name, 0) + value for name, value in found.items()}
    assert algorithm.summary(sums)["loss/policy"] == pytest.approx((0.5 * 2 - 0.5 * 2) / 2)


def test_returns_are_reported_where_an_estimator_has_any():
    episodes = make_episodes([1, 0], [0, 1], lengths=torch.tensor([2, 2]))
    tokens = make_tokens([[1, 1], [1, 1]])
    algorithm = make_algorithm(advantage="reinforce_pp", correction=[])
    _, sums = algorithm.loss(tokens.behaviour, algorithm.prepare(episodes, tokens, alone), totals_of(tokens))
    assert algorithm.summary(sums)["return/mean"] == 0.5
    assert algorithm.summary(sums)["return/std"] == 0.5


def test_a_rule_named_twice_is_reported_twice():
    found = summary(correction=["veto", ("veto", {"threshold": 0.6})])
    assert found["masked/veto"] == 0
    assert found["masked/veto_1"] == pytest.approx(0.6)


def test_the_statistics_of_episodes_are_of_rewards_and_lengths():
    episodes = make_episodes([1, 0, 0.5, 0.5], [0, 0, 1, 1], lengths=torch.tensor([1, 2, 3, 6]))
    found = episode_metrics(episodes)
    assert found["reward/mean"] == 0.5
    assert (found["reward/min"], found["reward/max"]) == (0, 1)
    assert (found["length/mean"], found["length/max"]) == (3, 6)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        # Rewards differ in the first group of three alone; the penalty makes those of the second differ.
        ({}, 2 / 3),
        ({"reward": [("overlong", {"max_length": 6, "buffer": 1})]}, 1 / 3),
        ({"reward": [("overlong", {"max_length": 6, "buffer": 1})], "correction": ["zero_variance"]}, 2 / 3),
        ({"correction": [("zero_variance", {"score": "style"})]}, 0),
    ],
)
def test_groups_without_a_difference_are_counted_by_the_score_by_which_they_are_dropped(changes, share):
    style = torch.arange(6.0)
    episodes = make_episodes(
        [1, 0, 0.5, 0.5, 1, 1],
        [0, 0, 1, 1, 2, 2],
        lengths=torch.tensor([1, 1, 3, 6, 1, 1]),
        extra={"style": style},
    )
    assert make_algorithm(**changes).summary({}, episodes)["groups/zero_variance"] == pytest.approx(share)
