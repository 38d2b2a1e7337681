"""Losses, advantages and corrections for old data that measure how far a whole sequence is from the behaviour policy:
numbers worked by hand, the formulas again in plain loops, and what each becomes when the data are new."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages.oapl import OaplAdvantage
from asyncrl.algorithms.aggregation import SeqMeanTokenMean, SeqMeanTokenSum
from asyncrl.algorithms.corrections.base import Ages
from asyncrl.algorithms.corrections.vaco import Vaco
from asyncrl.algorithms.losses.base import Loss, Updates
from asyncrl.algorithms.losses.gpg import Gpg
from asyncrl.algorithms.losses.oapl import Oapl
from asyncrl.algorithms.losses.topr import Topr
from asyncrl.algorithms.losses.vespo import Vespo
from asyncrl.algorithms.policy_tokens import PolicyTokens
from tests.algorithms.support import (
    alone,
    make_algorithm,
    make_episodes,
    make_tokens,
    make_updates,
    preset,
    random_batch,
    totals_of,
)

LOG2 = math.log(2)
SEEDS = st.integers(0, 10_000)
several = settings(max_examples=15, deadline=None)
EXAMPLES = {
    # W = 2: 2^2 exp(3 (1 - 2)) = 4 exp(-3) = .19914827. W = 1/2: (1/2)^3 exp(2 / 2) = e / 8 = .33978523.
    # The log-probs are -1 + log 2 = -.30685282, -1 and -1 - log 2 = -1.69314718.
    "vespo weighs a sequence by one smooth weight for each sign": (
        Vespo(),
        make_updates([LOG2, 0.0, -LOG2], [1, 1, -2], [2, 1]),
        [0.06110921, 0.19914827, -1.15061283],
        [-0.19914827, -0.19914827, 0.67957046],
        {"faded": []},
    ),
    # W = 16: 16^2 exp(-45) = 7e-18. W = 1/8: (1/8)^2 exp(21 / 8) = .2157 where A > 0, and (1/8)^3 exp(14 / 8) = .01124
    # where A < 0. W = 1/16: (1/16)^3 exp(15 / 8) = .0016.
    "vespo marks sequences of nearly no weight": (
        Vespo(),
        make_updates([2 * LOG2, 2 * LOG2, -3 * LOG2, -3 * LOG2, -4 * LOG2], [1, 1, 1, -1, -1], [2, 1, 1, 1]),
        [0, 0, 0.66422468, -0.034611255, -0.0060059494],
        [0, 0, -0.21569647, 0.011239458, 0.0015919969],
        {"faded": [0, 1, 4]},
    ),
    # W = 1/4 where A > 0: the weight is 1. W = 1/4 and 2 where A < 0: the weights are 1/4 and 1.
    "topr tapers bad sequences only": (
        Topr(),
        make_updates([-2 * LOG2, 0.0, -2 * LOG2, 0.0, LOG2], [1, 1, -1, -1, -3], [2, 2, 1]),
        [1 + 2 * LOG2, 1, -0.25 * (1 + 2 * LOG2), -0.25, -3 * (1 - LOG2)],
        [-1, -1, 0.25, 0.25, 3],
        {"high": [4], "faded": []},
    ),
    "topr may take the mean of the log-ratios, and another cap": (
        Topr(level="geometric", cap=1.5),
        make_updates([-2 * LOG2, 0.0, LOG2], [-1, -1, -1], [2, 1]),
        [-0.5 * (1 + 2 * LOG2), -0.5, -1.5 * (1 - LOG2)],
        [0.5, 0.5, 1.5],
        {"high": [2], "faded": []},
    ),
    # (.5 (.2 + .4) - 1)^2 = .49 on two tokens, whose sum has the gradient 2 * 2 (-.7) .5. (-.25 + 2)^2 = 3.0625 on one.
    "oapl regresses the log-ratio of a sequence on its advantage": (
        Oapl(beta=0.5),
        make_updates([0.2, 0.4, -0.5], [1, 1, -2], [2, 1]),
        [0.49, 0.49, 3.0625],
        [-1.4, -1.4, 1.75],
        {},
    ),
}


def gradient(loss: Loss, updates: Updates) -> torch.Tensor:
    """d sum(losses) / d logprobs."""
    (result,) = torch.autograd.grad(loss(updates).losses.sum(), updates.logprobs)
    return result


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_loss_has_its_values_gradients_and_marks(example):
    loss, updates, losses, gradients, marks = EXAMPLES[example]
    result = loss(updates)
    assert result.losses.tolist() == pytest.approx(losses)
    assert gradient(loss, updates).tolist() == pytest.approx(gradients)
    assert {name: mark.nonzero()[:, 0].tolist() for name, mark in result.marks.items()} == marks


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3))
@several
def test_vespo_and_topr_are_the_plain_policy_gradient_on_new_data(advantages):
    updates = make_updates([0.0, 0.0, 0.0], advantages, [2, 1])
    for loss in (Vespo(), Vespo(k_pos=0.5, lambda_neg=4.0), Topr(), Topr(level="geometric")):
        assert loss(updates).losses.tolist() == pytest.approx(Gpg()(updates).losses.tolist())
        assert gradient(loss, updates).tolist() == pytest.approx(gradient(Gpg(), updates).tolist())


@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.01, 2))
@several
def test_on_new_data_oapl_has_the_direction_of_the_plain_policy_gradient(first, second, beta):
    # Aggregated as the presets do: 2 beta times the gradient of the log-prob of the sequence, weighted by A.
    updates = make_updates([0.0, 0.0, 0.0], [first, first, second], [2, 1])
    spans, totals = updates.view.sequences, totals_of(make_tokens([[1, 1], [1]]))
    ours = SeqMeanTokenMean()(Oapl(beta=beta)(updates).losses, spans, spans.lengths, totals)
    plain = SeqMeanTokenSum()(Gpg()(updates).losses, spans, spans.lengths, totals)
    (left,), (right,) = (torch.autograd.grad(loss, updates.logprobs) for loss in (ours, plain))
    assert left.tolist() == pytest.approx((2 * beta * right).tolist())


@given(st.floats(0.1, 4), st.floats(0.1, 8), st.floats(-12, 12))
@several
def test_no_weight_of_vespo_exceeds_the_one_at_its_peak(k, decay, log_ratio):
    # The peak is at W = k / lambda: (k / lambda)^k exp(lambda - k).
    loss = Vespo(k_pos=k, lambda_pos=decay)
    peak = math.exp(k * math.log(k / decay) + decay - k)
    weight = -float(gradient(loss, make_updates([log_ratio], [1.0])))
    assert 0 <= weight <= peak * (1 + 1e-9)
    at_peak = -float(gradient(loss, make_updates([math.log(k / decay)], [1.0])))
    assert at_peak == pytest.approx(peak)


@pytest.mark.parametrize("extreme", [(4.0, 1e-9), (0.0, 80.0), (4.0, 80.0)])
@pytest.mark.parametrize("log_ratio", [-30.0, -3.0, 0.0, 3.0, 30.0])
def test_the_weights_of_vespo_are_finite_in_float32_for_every_allowed_parameter(extreme, log_ratio):
    k, decay = extreme
    old = torch.tensor([-1.0, -1.0])
    updates = replace(
        make_updates([0, 0], [1, 1]),
        logprobs=(old + log_ratio).requires_grad_(),
        proximal=old,
        behaviour=old,
        advantages=torch.tensor([1.0, 1.0]),
    )
    assert gradient(Vespo(k_pos=k, lambda_pos=decay), updates).isfinite().all()


def far_updates(seed: int) -> Updates:
    """The policy moved by up to about one nat a token away from the behaviour policy; each sequence has one
    advantage."""
    _, tokens = random_batch(seed, drift=0.5)
    view = PolicyTokens.of(tokens)
    behaviour, policy = view.take(tokens.behaviour), view.take(tokens.proximal)
    signs = torch.where(torch.arange(len(view.owner)) % 2 == 0, 1.0, -1.0).double()
    advantages = view.sequences.spread(signs * (1 + torch.arange(len(view.owner))))
    return Updates(view, policy.clone().requires_grad_(), policy, behaviour, advantages)


def by_sequence(updates: Updates) -> list[list[tuple[float, float, float]]]:
    """Return the tokens of each sequence, as (log pi, log mu, A)."""
    columns = (updates.logprobs, updates.behaviour, updates.advantages)
    tokens, found = list(zip(*(each.tolist() for each in columns), strict=True)), []
    for length in updates.view.sequences.lengths.tolist():
        found.append(tokens[:length])
        tokens = tokens[length:]
    return found


@given(SEEDS)
@several
def test_vespo_topr_and_oapl_again(seed):
    updates = far_updates(seed)
    vespo, topr, oapl = [], [], []
    for tokens in by_sequence(updates):
        ratio = math.prod(math.exp(log_pi) / math.exp(log_mu) for log_pi, log_mu, _ in tokens)
        regression = (0.3 * sum(log_pi - log_mu for log_pi, log_mu, _ in tokens) - tokens[0][2]) ** 2
        for log_pi, _, advantage in tokens:
            k, decay = (1.5, 2.5) if advantage >= 0 else (3.0, 2.0)
            vespo.append(-(ratio**k) * math.exp(decay * (1 - ratio)) * advantage * log_pi)
            weight = 1.0 if advantage >= 0 else min(ratio, 0.8)
            topr.append(-weight * advantage * log_pi)
            oapl.append(regression)
    assert Vespo(k_pos=1.5, lambda_pos=2.5)(updates).losses.tolist() == pytest.approx(vespo)
    assert Topr(cap=0.8)(updates).losses.tolist() == pytest.approx(topr)
    assert Oapl(beta=0.3)(updates).losses.tolist() == pytest.approx(oapl)


def test_the_soft_maximum_of_oapl_is_the_groups_own():
    """Group 0, beta 1: V = log((e + 1) / 2) = .62011451. Group 1: V = log((e^2 + 3 e^0) / 4) = .95445859 for rewards
    2, 0, 0, 0."""
    scores = OaplAdvantage().scores(make_episodes([1, 0, 2, 0, 0, 0], [0, 0, 1, 1, 1, 1]))
    value = 0.95445859
    assert scores.tolist() == pytest.approx([0.37988549, -0.62011451, 2 - value, -value, -value, -value], abs=1e-7)


@pytest.mark.parametrize(("beta", "baseline"), [(1e-6, 0.9), (1e-300, 0.9), (1e9, 0.4), (1e300, 0.4)])
def test_the_baseline_of_oapl_goes_from_the_largest_reward_to_the_mean(beta, baseline):
    rewards = [0.9, 0.3, 0.0]
    scores = OaplAdvantage(beta=beta).scores(make_episodes(rewards, [0, 0, 0]))
    assert scores.tolist() == pytest.approx([each - baseline for each in rewards], abs=1e-5)


def test_equal_rewards_have_no_advantage_over_their_soft_maximum():
    assert OaplAdvantage(beta=0.3).scores(make_episodes([0.7, 0.7, 0.7], [0, 0, 0])).tolist() == [0, 0, 0]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.floats(0.1, 3), st.floats(-5, 5))
@several
def test_a_constant_in_the_rewards_changes_no_advantage_of_oapl(rewards, beta, constant):
    plain = OaplAdvantage(beta=beta).scores(make_episodes(rewards, [0] * len(rewards)))
    moved = OaplAdvantage(beta=beta).scores(make_episodes([each + constant for each in rewards], [0] * len(rewards)))
    assert moved.tolist() == pytest.approx(plain.tolist(), abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.floats(0.2, 3))
@several
def test_the_best_policy_near_the_behaviour_policy_has_no_loss_in_oapl(rewards, beta):
    # A uniform behaviour policy over n answers, each sampled once: pi* = mu exp(R / beta) / Z, the optimum of the
    # reward minus beta KL(pi, mu).
    count = len(rewards)
    log_z = math.log(math.fsum(math.exp(each / beta) for each in rewards) / count)
    log_ratio = [each / beta - log_z for each in rewards]
    assert math.fsum(math.exp(each) for each in log_ratio) == pytest.approx(count)
    advantages = OaplAdvantage(beta=beta).scores(make_episodes(rewards, [0] * count)).tolist()
    losses = Oapl(beta=beta)(make_updates(log_ratio, advantages, [1] * count)).losses
    assert losses.tolist() == pytest.approx([0.0] * count, abs=1e-18)


def test_luspo_is_the_loss_of_gspo_times_the_length_of_each_sequence():
    """Lengths 2 and 1, s = exp(.3) and exp(.6), A = 1 and -2: (-2 exp(.3) + 1 * 2 exp(.6)) / 2, and each token has the
    gradient -s A / 2."""
    tokens = make_tokens([[1, 1], [1]])
    algorithm = make_algorithm(
        advantage="tests.algorithms.my_parts.Centred",
        loss=("gspo", {"clip_low": 1.0, "clip_high": 10.0}),
        correction=[],
        aggregation=preset("luspo").aggregation.name,
    )
    prepared = algorithm.prepare(make_episodes([0, 0], [0, 1]), tokens, alone)
    prepared = replace(prepared, advantages=torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64))
    logprobs = torch.tensor([0.2, 0.4, 0.6], dtype=torch.float64, requires_grad=True)
    loss, _ = algorithm.loss(logprobs, prepared, totals_of(tokens))
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.3) + math.exp(0.6))
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.3) / 2, -math.exp(0.3) / 2, math.exp(0.6)])


TOKENS = make_tokens([[0, 1, 1, 0, 1], [1, 1]])


@pytest.mark.parametrize(
    ("delta", "sign", "expected"),
    [
        (0.9, 1.0, [1, 1, 1, 1, 1]),
        (0.5, 1.0, [0, 0, 1, 1, 1]),
        (0.5, -1.0, [1, 1, 0, 1, 1]),
        (0.3, 1.0, [0, 0, 1, 1, 1]),
        (0.3, -1.0, [1, 1, 0, 1, 0]),
        (0.3, 0.0, [1, 1, 1, 1, 1]),
    ],
)
def test_vaco_drops_what_would_move_a_far_sequence_further_away(delta, sign, expected):
    """w = 2, 2, 1/2 | 1, 1/4: the means of |w - 1| are 5/6 and 3/8."""
    log_w = torch.tensor([LOG2, LOG2, -LOG2, 0.0, -2 * LOG2], dtype=torch.float64)
    ages = Ages(PolicyTokens.of(TOKENS), log_w, torch.full_like(log_w, sign))
    assert Vaco(delta=delta).keep(ages).int().tolist() == expected


@given(SEEDS, st.floats(0.01, 1))
@several
def test_vaco_again(seed, delta):
    updates = far_updates(seed)
    ages = Ages(updates.view, updates.proximal - updates.behaviour, updates.advantages)
    expected = []
    for tokens in by_sequence(updates):
        ratios = [math.exp(log_pi - log_mu) for log_pi, log_mu, _ in tokens]
        far = math.fsum(abs(ratio - 1) for ratio in ratios) / len(ratios) > delta
        expected += [
            not (far and ((ratio > 1) if advantage > 0 else (ratio < 1)))
            for ratio, (_, _, advantage) in zip(ratios, tokens, strict=True)
        ]
    assert Vaco(delta=delta).keep(ages).tolist() == expected


def test_vaco_keeps_all_new_data():
    log_w = torch.zeros(5, dtype=torch.float64)
    assert Vaco(delta=1e-9).keep(Ages(PolicyTokens.of(TOKENS), log_w, log_w + 1)).all()
