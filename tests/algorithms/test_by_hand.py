"""Whole steps whose every number is worked out by hand in the comments."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.batch import Totals
from asyncrl.config.schema import PartConfig
from asyncrl.errors import InvariantError
from tests.algorithms.support import alone, make_algorithm, make_episodes, make_tokens, preset, totals_of

ROOT_HALF = 0.70711
"""The unbiased standard deviation of rewards 1 and 0: sqrt((1/4 + 1/4) / 1)."""


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def stepped(algorithm: Algorithm, tokens, logprobs: Tensor, entropy: Tensor | None = None):
    """The loss of the whole batch as one pass, its gradient by log-prob, and the step's metrics."""
    logprobs = logprobs.clone().requires_grad_()
    loss, sums = algorithm.loss(logprobs, tokens, totals_of(tokens), entropy)
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), algorithm.summary(sums)


def test_grpo_turns_adds_to_the_groups_advantage_each_steps_distance_from_the_episodes_mean():
    # Rewards 1 and 0: (1 - 1/2) / 0.70711 = 0.70711, and -0.70711.
    # Steps of the first: 0.9, 0.3, 0; mean 0.4; times beta 1/2: 0.25, -0.05, -0.2. One step alone: 0.
    episodes = make_episodes([1, 0], [0, 0], steps=[(0, 3, 0.9), (0, 5, 0.3), (0, 8, 0.0), (1, 3, 0.7)])
    tokens = make_tokens([[0, 1, 1, 0, 1, 0, 1, 1], [0, 1, 1]])
    prepared = make_algorithm(advantage="grpo_turns", correction=[]).prepare(episodes, tokens, alone)
    first = [0, 0.95711, 0.95711, 0, 0.65711, 0, 0.50711, 0.50711]
    assert prepared.advantages.tolist() == pytest.approx([*first, 0, -ROOT_HALF, -ROOT_HALF], abs=1e-5)


def test_zero_variance_drops_the_tokens_of_a_group_without_differences_from_every_term():
    # Group 0 (1, 0): advantages +-1/2 a token. Group 1 (1, 1): dropped, with its entropies 8 and 16.
    episodes = make_episodes([1, 0, 1, 1], [0, 0, 1, 1])
    algorithm = make_algorithm(advantage="dr_grpo", loss="gpg", correction=["zero_variance"], entropy_weight=0.5)
    tokens = algorithm.prepare(episodes, make_tokens([[0, 1], [1], [1], [1]]), alone)
    loss, gradient, metrics = stepped(algorithm, tokens, floats(0, -1, -3, -5, -7), floats(0, 2, 4, 8, 16))
    # Policy: (-(1/2)(-1) - (-1/2)(-3)) / 4 = -0.25. Entropy: -(1/2)(2 + 4) / 4 = -0.75. N stays 4.
    assert loss == pytest.approx(-1.0)
    assert gradient == [0, -0.125, 0.125, 0, 0]
    assert metrics["masked/zero_variance"] == 0.5
    assert metrics["entropy"] == pytest.approx(3)


@pytest.mark.parametrize(
    ("outcomes", "lengths", "advantages", "dropped"),
    [
        # The buffer is from 80 to 100 policy tokens: 82 tokens cost 2/20. Rewards a, a, a, b with b < a have the mean
        # a - (a - b)/4 and the standard deviation (a - b)/2: advantages 1/2, 1/2, 1/2, -3/2, however small the penalty.
        ([0, 0, 0, 0], [10, 20, 30, 40], [0, 0, 0, 0], True),
        ([0, 0, 0, 0], [10, 20, 30, 82], [0.5, 0.5, 0.5, -1.5], True),
        ([1, 1, 1, 1], [10, 20, 30, 82], [0.5, 0.5, 0.5, -1.5], True),
        ([1, 1, 1, 1], [10, 20, 30, 100], [0.5, 0.5, 0.5, -1.5], True),
        ([1, 0, 0, 0], [10, 20, 30, 40], [1.5, -0.5, -0.5, -0.5], False),
        # Rewards 1, 0, 0, -.1: mean .225, standard deviation (1.01 - .2025)/3 -> .51881.
        ([1, 0, 0, 0], [10, 20, 30, 82], [1.49379, -0.43368, -0.43368, -0.62643], False),
    ],
)
def test_dapo_drops_groups_whose_answers_are_all_right_or_all_wrong_whatever_their_lengths_cost(
    outcomes, lengths, advantages, dropped
):
    config = replace(preset("dapo"), reward=[PartConfig("overlong", {"max_length": 100})])
    episodes = make_episodes(outcomes, [0] * 4, lengths=torch.tensor(lengths))
    tokens = make_tokens([[0] + [1] * length for length in lengths])
    prepared = Algorithm.from_config(config).prepare(episodes, tokens, alone)
    firsts = [(prepared.sequence == row).nonzero()[1, 0].item() for row in range(4)]
    assert prepared.advantages[firsts].tolist() == pytest.approx(advantages, abs=1e-4)
    rejected = prepared.rejected[tokens.mask] != 0
    assert rejected.tolist() == [dropped] * len(rejected)


@pytest.mark.parametrize(
    ("score", "kept"),
    [("outcome", [False, False, True]), ("reward", [False, True, True]), ("style", [True, False, False])],
)
def test_zero_variance_compares_the_score_that_it_names(score, kept):
    """Groups of two. Outcomes 1, 1 | 0, 0 | 1, 0; rewards are these less a penalty of 1/2 for the second group's last;
    the scores named style differ in the first group alone."""
    episodes = make_episodes(
        [1, 1, 0, 0, 1, 0],
        [0, 0, 1, 1, 2, 2],
        lengths=torch.tensor([4, 4, 4, 9, 4, 4]),
        extra={"style": floats(1, 2, 5, 5, 7, 7)},
    )
    penalty = ("overlong", {"max_length": 10, "buffer": 2})
    algorithm = make_algorithm(reward=[penalty], correction=[("zero_variance", {"score": score})])
    prepared = algorithm.prepare(episodes, make_tokens([[1]] * 6), alone)
    assert (prepared.rejected == 0).tolist() == [each for each in kept for _ in range(2)]


def test_best_of_n_takes_the_score_from_the_others_before_the_group_is_compared():
    # Scores .6 .2 | .1 .4, weight 1/2: rewards 1 - 0, 1 - .1 | 0 - .05, 1 - 0 = 1, .9 | -.05, 1.
    # Group means .95 and .475: advantages +-.05 and -.525, .525.
    episodes = make_episodes([1, 1, 0, 1], [0, 0, 1, 1], extra={"process": floats(0.6, 0.2, 0.1, 0.4)})
    algorithm = make_algorithm(advantage="dr_grpo", reward=[("best_of_n", {"weight": 0.5})], correction=[])
    prepared = algorithm.prepare(episodes, make_tokens([[1], [1], [1], [1]]), alone)
    assert prepared.advantages.tolist() == pytest.approx([0.05, -0.05, -0.525, 0.525])


def test_overlong_takes_from_the_reward_before_the_group_is_compared():
    # From 6 to 10 tokens the penalty grows to 2: lengths 6, 7, 9, 12 lose 0, 2/4, 6/4, 2 of their reward 1.
    # Rewards 1, .5, -.5, -1 have the mean 0.
    episodes = make_episodes([1, 1, 1, 1], [0] * 4, lengths=torch.tensor([6, 7, 9, 12]))
    penalty = ("overlong", {"max_length": 10, "buffer": 4, "weight": 2.0})
    algorithm = make_algorithm(advantage="dr_grpo", reward=[penalty], correction=[])
    prepared = algorithm.prepare(episodes, make_tokens([[1], [1], [1], [1]]), alone)
    assert prepared.advantages.tolist() == pytest.approx([1, 0.5, -0.5, -1])


def test_overlong_begins_at_four_fifths_of_its_limit():
    episodes = make_episodes([1, 1], [0, 0], lengths=torch.tensor([8, 9]))
    algorithm = make_algorithm(advantage="dr_grpo", reward=[("overlong", {"max_length": 10})], correction=[])
    prepared = algorithm.prepare(episodes, make_tokens([[1], [1]]), alone)
    assert prepared.advantages.tolist() == pytest.approx([0.25, -0.25])


def test_entropy_is_taken_from_the_loss_under_the_same_aggregation():
    # seq-mean-token-mean: (2 + 4)/2 = 3 and 7: mean 5. Weight .1: -.5. Gradient -.1 / (2 * 2) twice, -.1 / 2.
    algorithm = make_algorithm(
        advantage="dr_grpo", correction=[], entropy_weight=0.1, aggregation="seq-mean-token-mean"
    )
    episodes = make_episodes([1, 1], [0, 0])
    tokens = algorithm.prepare(episodes, make_tokens([[1, 0, 1], [1]]), alone)
    entropy = floats(2, 100, 4, 7).requires_grad_()
    loss, sums = algorithm.loss(floats(0, 0, 0, 0).requires_grad_(), tokens, Totals(3, 2), entropy)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5)
    assert entropy.grad.tolist() == pytest.approx([-0.025, 0, -0.025, -0.05])
    assert algorithm.summary(sums)["entropy"] == pytest.approx(13 / 3)


@pytest.mark.parametrize(
    ("aggregation", "expected", "gradients"),
    [
        # -A log pi: 1/2, (dropped), 1/2, -1/2, -1/2: sum 0, over all 6 tokens.
        ("token-mean", 0, [-1 / 12, 0, 0, -1 / 12, 1 / 12, 1 / 12]),
        # Means 1/2, (dropped) 0, 1/2, -1/2: sum 1/2, over all 4 sequences.
        ("seq-mean-token-mean", 0.125, [-1 / 8, 0, 0, -1 / 8, 1 / 16, 1 / 16]),
    ],
)
def test_the_veto_drops_a_whole_sequence_for_one_token_and_divides_by_all(aggregation, expected, gradients):
    """Rewards 1, 0 | 1, 0, so that advantages are +-1/2. The veto at 0.01 drops the second sequence, one of whose
    ratios is 0.001; the gradient of a kept token is -A over what the aggregation divides by."""
    old = floats(-1, -1, -1, -1, -1, -1)
    seen = old - floats(0, 0, math.log(0.001), 0, 0, 0)
    veto = ("veto", {"threshold": 0.01})
    algorithm = make_algorithm(advantage="dr_grpo", loss="gpg", correction=[veto], aggregation=aggregation)
    tokens = make_tokens([[1], [1, 1], [1], [1, 1]], behaviour=seen, proximal=old)
    tokens = algorithm.prepare(make_episodes([1, 0, 1, 0], [0, 0, 1, 1]), tokens, alone)
    loss, gradient, metrics = stepped(algorithm, tokens, old)
    assert loss == pytest.approx(expected)
    assert gradient == pytest.approx(gradients)
    assert [metrics["masked/veto"], metrics["masked/any"]] == pytest.approx([2 / 6] * 2)


def test_each_weight_stream_is_a_mean_over_its_own_tokens():
    """Sequences of 2, 1 and 1 policy tokens with log pi -1, -2 | -3 | -5; advantages (dr_grpo of 1, 0 | 1) are 1/2,
    -1/2 | 1. The scores weigh rl by 1, 2, 0: (1/2 (1 + 2) + 2 (-1/2) 3) / (2 + 2) = (3/2 - 3) / 4 = -3/8. ce is 1/10 of
    the mean over the sequences of outcome 1, the first and the last: (1 + 2 + 5) / 3 / 10 = 4/15."""
    episodes = make_episodes([1, 0, 1], [0, 0, 1], extra={"practised": floats(1, 2, 0)})
    streams = [("rl", {"score": "practised"}), ("ce", {"weight": 0.1, "score": "outcome"})]
    algorithm = make_algorithm(advantage="dr_grpo", loss="gpg", correction=[], stream=streams)
    tokens = algorithm.prepare(episodes, make_tokens([[0, 1, 1], [1], [1]]), alone)
    loss, gradient, metrics = stepped(algorithm, tokens, -floats(9, 1, 2, 3, 5))
    assert [metrics["loss/policy"], metrics["loss/ce"]] == pytest.approx([-3 / 8, 4 / 15])
    assert loss == pytest.approx(-3 / 8 + 4 / 15)
    # rl: -w A / 4; ce: -1 / 30 a token of the first and the last.
    assert gradient == pytest.approx([0, -1 / 8 - 1 / 30, -1 / 8 - 1 / 30, 1 / 4, -1 / 30])


def test_the_stream_of_distillation_pulls_to_the_reference_within_its_region():
    """pi = .4, .1, .4 with mu = .2, .4, .1: ratios 2, 1/4, 4, the last at the cap 3; the second fell by .3 > .2 and is
    dropped. log(pi_ref / pi) = log 2, -, -log 2. Values -2 log 2, 0, 3 log 2, over 3 tokens; so are the gradients."""
    now, behaviour, reference = floats(0.4, 0.1, 0.4).log(), floats(0.2, 0.4, 0.1).log(), floats(0.8, 0.8, 0.2).log()
    streams = [("rl", {"weight": 0.0}), ("ref_kl", {"cap": 3.0})]
    algorithm = make_algorithm(stream=streams, correction=["veto"])
    tokens = make_tokens([[1, 1], [1]], behaviour=behaviour, proximal=now, reference=reference)
    tokens = algorithm.prepare(make_episodes([1, 0], [0, 0]), tokens, alone)
    loss, gradient, metrics = stepped(algorithm, tokens, now)
    expected = [-2 * math.log(2) / 3, 0, math.log(2)]
    assert loss == metrics["loss/ref_kl"] == pytest.approx(sum(expected))
    assert gradient == pytest.approx(expected)
    assert metrics["loss/policy"] == 0
    assert metrics["clip/ref_kl_low"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ("bonus", r"the score bonus is not among \['outcome', 'reward', 'style'\]"),
        ("style", r"stream ce: style is inf for sequence 1; a weight must be finite"),
    ],
)
def test_a_stream_without_its_score_or_with_an_infinite_one_is_refused(score, message):
    algorithm = make_algorithm(stream=[("ce", {"score": score})])
    episodes = make_episodes([1, 0], [0, 0], extra={"style": floats(1, math.inf)})
    with pytest.raises(InvariantError, match=message):
        algorithm.prepare(episodes, make_tokens([[1], [1]]), alone)


def test_a_reward_below_zero_leaves_its_sequence_out_of_a_stream_and_the_run_goes_on():
    algorithm = make_algorithm(stream=[("ce", {"score": "reward"})])
    prepared = algorithm.prepare(make_episodes([2, -1], [0, 0]), make_tokens([[1], [1]]), alone)
    assert prepared.streams.tolist() == [[4], [0]]


def test_the_prompt_mean_is_a_mean_over_groups_of_the_means_of_their_tokens():
    """Advantages 1 and losses -log pi: group 0 has 1, 2 and 3, 4, 5, a mean of 15/5 = 3; group 1 has 7: (3 + 7) / 2.
    A token of group 0 has the gradient -1 / (5 * 2), that of group 1 -1 / (1 * 2). In a minibatch of the first sequence
    and the last, the groups have 2 tokens and 1: (3/2 + 7) / 2 = 17/4."""
    tokens = make_tokens([[1, 1], [1, 1, 1], [0, 1]], advantages=floats(1, 1, 1, 1, 1, 0, 1))
    logprobs = -floats(1, 2, 3, 4, 5, 9, 7)
    algorithm = make_algorithm(loss="gpg", correction=[], aggregation="prompt-mean")
    sampled, group = [2, 3, 1], ["a", "a", "b"]
    policy = logprobs.clone().requires_grad_()
    loss, _ = algorithm.loss(policy, tokens, Totals.of(sampled, group, range(3)))
    loss.backward()
    assert loss.item() == pytest.approx(5)
    assert policy.grad.tolist() == pytest.approx([-0.1] * 5 + [0, -0.5])
    part = torch.tensor([0, 1, 5, 6])
    loss, _ = algorithm.loss(logprobs[part], tokens.select(part), Totals.of(sampled, group, [0, 2]))
    assert loss.item() == pytest.approx(17 / 4)


def test_a_sequence_without_policy_tokens_is_in_no_count():
    """Two of three members have policy tokens: (3 + (4 + 5)) / 2 = 6 a sequence."""
    tokens = make_tokens([[1], [0, 0], [1, 1]], advantages=floats(1, 0, 0, 1, 1))
    totals = Totals.of([1, 0, 2], ["a", "b", "b"], range(3))
    assert (totals.tokens, totals.sequences, totals.groups) == (3, 2, 2)
    assert Totals.of([1, 0, 2], ["a", "b", "b"], [0, 1]).groups == 1
    algorithm = make_algorithm(loss="gpg", correction=[], aggregation="seq-mean-token-sum")
    loss, _ = algorithm.loss(-floats(3, 8, 8, 4, 5), tokens, totals)
    assert loss.item() == pytest.approx(6)


def test_the_prompt_mean_of_the_critics_losses_needs_the_groups_too():
    tokens = make_tokens([[1, 1], [1]], values=floats(0, 0, 0), returns=floats(1, 3, 2))
    algorithm = make_algorithm(value=("clipped", {"clip": None}), value_aggregation="prompt-mean")
    # Errors 1, 9 | 4, halved: ((1 + 9) / 2 / 2 + 4 / 2) / 2, and in one group 14 / 2 / 3.
    for group, expected in (([0, 1], 2.25), ([0, 0], 7 / 3)):
        loss, _ = algorithm.value_loss(floats(0, 0, 0), tokens, Totals.of([2, 1], group, [0, 1]))
        assert loss.item() == pytest.approx(expected)
    with pytest.raises(InvariantError, match=r"prompt-mean needs the tokens of each group: give the totals of"):
        algorithm.value_loss(floats(0, 0, 0), tokens, Totals(3, 2))


def test_seq_mean_token_mean_after_a_rejected_token_still_divides_by_the_sequences_length():
    # Ratios 1, 8 and 1: the mask drops the second token of the first sequence.
    # A = 1/2: (1/2 + 0) / 2 = 1/4; A = -1/2: -1/2 / 1. Mean -1/8.
    old = floats(-1, -1, -1)
    algorithm = make_algorithm(advantage="dr_grpo", loss="gpg", correction=["mask"], aggregation="seq-mean-token-mean")
    tokens = make_tokens([[1, 1], [1]], behaviour=old - floats(0, math.log(8), 0), proximal=old)
    tokens = algorithm.prepare(make_episodes([1, 0], [0, 0]), tokens, alone)
    loss, gradient, _ = stepped(algorithm, tokens, old)
    assert loss == pytest.approx(-0.125)
    assert gradient == pytest.approx([-1 / 8, 0, 1 / 4])


def test_masking_and_normalising_leave_a_step_of_the_same_size():
    # Ratios 1, 8 (dropped) and 1/2: weights 1 and 1/2 over 3 tokens, a mean of 1/2: 2 and 1, which add up to N = 3.
    # Gradient -w A / 3 with A = 1/2, 1/2, -1/2: -1/3, 0, 1/6.
    old = floats(-1, -1, -1)
    algorithm = make_algorithm(advantage="dr_grpo", loss="gpg", correction=["mask", "normalise"])
    tokens = make_tokens([[1, 1], [1]], behaviour=old - floats(0, math.log(8), math.log(0.5)), proximal=old)
    tokens = algorithm.prepare(make_episodes([1, 0], [0, 0]), tokens, alone)
    _, gradient, _ = stepped(algorithm, tokens, old)
    assert gradient == pytest.approx([-1 / 3, 0, 1 / 6])


def test_the_prompt_mean_does_not_count_a_group_that_has_no_policy_tokens():
    # The second group has none, so the mean is that of one group: -(1 + 2) / 2.
    totals = Totals.of([2, 0], [0, 1], range(2))
    assert totals.groups == 1
    algorithm = make_algorithm(loss="gpg", advantage="dr_grpo", correction=[], aggregation="prompt-mean")
    tokens = make_tokens([[1, 1], [0, 0]])
    tokens = algorithm.prepare(make_episodes([1, 0], [0, 1]), tokens, alone)
    loss, _ = algorithm.loss(floats(1, 2, 0, 0), tokens, totals)
    assert loss.item() == pytest.approx(-1.5)
