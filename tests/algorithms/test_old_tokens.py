"""Old tokens are context: the loss is that of a batch in which they are no policy tokens, and the advantages are those
of a batch in which they are not old."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.batch import Episodes, Tokens
from tests.algorithms.support import alone, make_algorithm, make_episodes, make_tokens, random_batch, rows, totals_of

SEEDS = st.integers(0, 10_000)
several = settings(max_examples=10, deadline=None)
LOSSES = [
    *("ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce", "dppo_tv", "ipo", "clip_cov", "kl_cov"),
    *("vespo", "topr", "oapl", "sat", "sat_gspo", "stable_reinforce"),
]
AGGREGATIONS: list[Any] = [
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "prompt-mean",
    ("seq-mean-token-sum-norm", {"norm": 8.0}),
]
TRUNCATE, REJECT = ("truncate", {"level": "sequence", "cap": 1.1}), ("reject", {"over": "sequence_mean", "high": 0.05})
CORRECTIONS: list[list[Any]] = [[], [TRUNCATE], [REJECT], [TRUNCATE, ("normalise", {})]]
OWN_RATIO = ("reinforce", "ipo", "vespo", "topr", "oapl", "sat", "sat_gspo")
"""Losses that weigh tokens themselves, and so take no correction."""


def old_batch(seed: int) -> tuple[Episodes, Tokens]:
    """A random batch in which versions 0 to 2 are too old, and so is the whole first sequence."""
    episodes, tokens = random_batch(seed)
    old = tokens.mask & ((tokens.versions < 3) | (tokens.sequence == 0))
    return episodes, replace(tokens, old=old)


def without(tokens: Tokens) -> Tokens:
    """The batch in which the old tokens are no policy tokens."""
    assert tokens.old is not None
    return replace(tokens, mask=tokens.mask & ~tokens.old, old=None)


def learned(algorithm: Algorithm, episodes: Episodes, tokens: Tokens) -> tuple[float, Tensor, dict[str, Tensor]]:
    """The loss, its gradient by all log-probs, and the sums for metrics. The policy has moved since the step began."""
    prepared = algorithm.prepare(episodes, tokens, alone)
    assert tokens.proximal is not None
    moved = tokens.proximal + 0.1 * torch.arange(len(tokens.mask)).sin()
    logprobs = moved.clone().requires_grad_()
    loss, sums = algorithm.loss(
        logprobs, prepared, totals_of(tokens if tokens.old is None else without(tokens), episodes)
    )
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad, sums


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_that_of_a_batch_in_which_old_tokens_are_context(loss: str, aggregation: Any, correction: Any):
    for seed in range(3):
        episodes, tokens = old_batch(seed)
        correction = [] if loss in OWN_RATIO else correction
        algorithm = make_algorithm(loss=loss, aggregation=aggregation, advantage="grpo", correction=correction)
        found, gradient, sums = learned(algorithm, episodes, tokens)
        expected, other, others = learned(algorithm, episodes, without(tokens))
        assert found == pytest.approx(expected, abs=1e-12)
        torch.testing.assert_close(gradient, other)
        assert not gradient[tokens.old].any()
        assert sums.keys() == others.keys()
        for name, value in sums.items():
            torch.testing.assert_close(value, others[name], msg=name)


@pytest.mark.parametrize("correction", ["kpop", "outliers", "vaco", "m2po", "mask", "opsm", "veto", "zero_variance"])
def test_a_correction_is_that_of_a_batch_in_which_old_tokens_are_context(correction: str):
    parameters = {"vaco": {"delta": 0.05}, "kpop": {"phi": 0.01}, "outliers": {"sigmas": 1.0}}
    for seed in range(3):
        episodes, tokens = old_batch(seed)
        algorithm = make_algorithm(advantage="grpo", correction=[(correction, parameters.get(correction, {}))])
        found, gradient, _ = learned(algorithm, episodes, tokens)
        expected, other, _ = learned(algorithm, episodes, without(tokens))
        assert found == pytest.approx(expected, abs=1e-12)
        torch.testing.assert_close(gradient, other)


@given(SEEDS, st.sampled_from(["grpo", "gae", "rloo", "process_grpo", "pure", "grpo_turns", "opo", "vtrace"]))
@several
def test_advantages_are_those_of_the_whole_episodes(seed: int, advantage: str):
    """Also where all tokens of a step, or of a member, are too old."""
    episodes, tokens = old_batch(seed)
    algorithm = make_algorithm(advantage=advantage, correction=[])
    found = algorithm.prepare(episodes, tokens, alone)
    expected = algorithm.prepare(episodes, replace(tokens, old=None), alone)
    for name in ("advantages", "returns"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one, other)


@given(SEEDS)
@several
def test_the_critic_learns_from_young_tokens_only(seed: int):
    episodes, tokens = old_batch(seed)
    algorithm = make_algorithm(advantage="gae", correction=[])
    prepared = algorithm.prepare(episodes, tokens, alone)
    assert prepared.values is not None
    values = (prepared.values + 0.3).requires_grad_()
    loss, sums = algorithm.value_loss(values, prepared, totals_of(without(tokens), episodes))
    loss.backward()
    assert values.grad is not None
    assert not values.grad[tokens.old].any()
    assert float(sums["value/tokens"]) == int(without(tokens).mask.sum())


def test_a_process_model_learns_from_whole_episodes_that_have_a_young_token():
    """A store with masked plans may be trained again with such a model."""
    episodes, tokens = old_batch(0)
    assert tokens.implicit is not None
    algorithm = make_algorithm(advantage=("prime", {"beta": 0.1}), correction=[])
    kept = replace(tokens, mask=tokens.mask & (tokens.sequence > 0), old=None)
    log_ratio = tokens.implicit.clone().requires_grad_()
    totals = totals_of(without(tokens), episodes)
    loss, sums = algorithm.implicit_loss(log_ratio, episodes.outcome, tokens, totals)
    loss.backward()
    expected, _ = algorithm.implicit_loss(tokens.implicit, episodes.outcome, kept, totals_of(kept, episodes))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert int(sums["implicit/sequences"]) == totals.sequences
    assert log_ratio.grad is not None
    assert not log_ratio.grad[tokens.sequence == 0].any()


@given(SEEDS)
@several
def test_any_split_into_passes_is_one_batch(seed: int):
    episodes, tokens = old_batch(seed)
    algorithm = make_algorithm(loss="gspo", aggregation="seq-mean-token-mean", advantage="grpo", correction=[])
    prepared = algorithm.prepare(episodes, tokens, alone)
    totals = totals_of(without(tokens), episodes)
    assert tokens.proximal is not None
    whole, _ = algorithm.loss(tokens.proximal, prepared, totals)
    parts = [rows(tokens, members) for members in ([0], list(range(1, episodes.count)))]
    split = [algorithm.loss(tokens.proximal[part], prepared.select(part), totals)[0] for part in parts]
    assert float(sum(split)) == pytest.approx(float(whole), abs=1e-12)


@pytest.mark.parametrize("proximal", ["recompute", "training", "behaviour", "interpolate"])
def test_an_old_token_has_no_weight_but_a_proximal_log_prob(proximal: str):
    """Both are shown with kept episodes."""
    episodes, tokens = old_batch(0)
    tokens = tokens if proximal == "recompute" else replace(tokens, proximal=None)
    correction: list[Any] = [] if proximal == "behaviour" else [TRUNCATE]
    algorithm = make_algorithm(advantage="grpo", correction=correction, proximal=proximal)
    logprobs = tokens.behaviour - 0.25
    found, weights = algorithm.importance(logprobs, algorithm.prepare(episodes, tokens, alone))
    expected, _ = algorithm.importance(logprobs, algorithm.prepare(episodes, replace(tokens, old=None), alone))
    assert torch.equal(found, expected)
    assert not weights[tokens.old].any()
    assert weights[without(tokens).mask].all()


def test_a_member_without_a_young_token_counts_in_the_baseline_and_not_in_the_loss():
    """Rewards 0, 1 and 2 have the mean 1. The member with reward 0 is too old."""
    episodes = make_episodes([0.0, 1.0, 2.0], [0, 0, 0], version=5)
    old = torch.tensor([False, True, True, False, False, False, False, True, False])
    tokens = make_tokens([[0, 1, 1], [0, 1, 1], [0, 1, 1]], old=old)
    algorithm = make_algorithm(
        loss="reinforce", aggregation="seq-mean-token-mean", advantage=("grpo", {"normalise_std": False}), correction=[]
    )
    prepared = algorithm.prepare(episodes, tokens, alone)
    assert prepared.advantages is not None
    assert prepared.advantages[tokens.mask].tolist() == [-1, -1, 0, 0, 1, 1]
    totals = totals_of(without(tokens), episodes)
    assert (totals.tokens, totals.sequences) == (3, 2)
    logprobs = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    loss, _ = algorithm.loss(logprobs, prepared, totals)
    loss.backward()
    assert logprobs.grad is not None
    # The only young token of the last member has its whole weight: advantage 1, divided by two sequences.
    assert logprobs.grad.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, -0.5]
