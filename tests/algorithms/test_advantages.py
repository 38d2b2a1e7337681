"""Estimators against straightforward loops over padded rows, and the properties that all of them share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms import registry
from asyncrl.algorithms.advantages.gae import Gae
from asyncrl.algorithms.advantages.gdpo import Gdpo
from asyncrl.algorithms.advantages.gpg import GpgAdvantage
from asyncrl.algorithms.advantages.grpo import Grpo
from asyncrl.algorithms.advantages.grpo_passk import GrpoPassk
from asyncrl.algorithms.advantages.maxrl import MaxRl
from asyncrl.algorithms.advantages.opo import Opo
from asyncrl.algorithms.advantages.optimal_token_baseline import OptimalTokenBaseline
from asyncrl.algorithms.advantages.prime import Prime
from asyncrl.algorithms.advantages.process_grpo import ProcessGrpo
from asyncrl.algorithms.advantages.pure import Pure, min_form
from asyncrl.algorithms.advantages.reinforce_pp import ReinforcePp
from asyncrl.algorithms.advantages.reinforce_pp_baseline import ReinforcePpBaseline
from asyncrl.algorithms.advantages.remax import Remax
from asyncrl.algorithms.advantages.rloo import Rloo
from asyncrl.algorithms.advantages.vtrace import Vtrace
from asyncrl.errors import InvariantError
from tests.algorithms.support import (
    alone,
    make_algorithm,
    make_episodes,
    make_rollouts,
    make_tokens,
    on_ranks,
    random_batch,
    rows,
)

ALL = sorted(registry.parts("advantage"))
SEEDS = st.integers(0, 10_000)
CAPS = st.sampled_from([0.3, 1.0, 2.0, math.inf])


def algorithm_of(name: str):
    advantage = (name, {"weights": {"format": 1.0, "style": 0.5}} if name == "gdpo" else {})
    return make_algorithm(advantage=advantage, loss="gpg", correction=[], greedy_sibling=name == "remax")


def advantages_of(name: str, episodes, tokens) -> Tensor:
    return algorithm_of(name).prepare(episodes, tokens, alone).advantages


@given(SEEDS)
@settings(max_examples=20)
def test_gae_equals_the_loop_over_padded_rows(seed):
    episodes, tokens = random_batch(seed)
    estimate = Gae(gamma=0.9, lam=0.8, step_weight=0.5)(make_rollouts(episodes, tokens))
    expected, returns = [], []
    for row in range(episodes.count):
        mine = (tokens.sequence == row).nonzero().squeeze(1)
        ends = {int(end) - 1: 0.5 * float(score) for sequence, end, score in steps_of(episodes) if sequence == row}
        places = [int(place) for place in mine if tokens.mask[place]]
        rewards = [ends.get(int(tokens.position[place]), 0.0) for place in places]
        rewards[-1] += float(episodes.reward[row])
        after_value, after, out = 0.0, 0.0, []
        for place, reward in zip(reversed(places), reversed(rewards), strict=True):
            value = float(tokens.values[place])
            after = reward + 0.9 * after_value - value + 0.9 * 0.8 * after
            after_value = value
            out.append(after)
        expected += out[::-1]
        returns += [a + float(tokens.values[place]) for a, place in zip(out[::-1], places, strict=True)]
    torch.testing.assert_close(estimate.advantages, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(estimate.returns, torch.tensor(returns, dtype=torch.float64))


def steps_of(episodes):
    return zip(episodes.step_sequence.tolist(), episodes.step_end.tolist(), episodes.step_scores.tolist(), strict=True)


FOUR = make_episodes([1, 0, 0.5, 1], [0, 0, 1, 1])
ONE_SUCCESS = make_episodes([1, 0, 0, 0], [0, 0, 0, 0])
HALF = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("estimator", "episodes", "expected"),
    [
        (Grpo(), FOUR, [HALF, -HALF, -HALF, HALF]),
        (GrpoPassk(), FOUR, [2 * HALF, 0, 0, 2 * HALF]),
        (Rloo(), FOUR, [1, -1, -0.5, 0.5]),
        (Rloo(), ONE_SUCCESS, [1, -1 / 3, -1 / 3, -1 / 3]),
        (MaxRl(), ONE_SUCCESS, [3, -1, -1, -1]),
        (MaxRl(), make_episodes([0, 0], [0, 0]), [0, 0]),
        # The baseline is weighted by length: (1 * 1 + 3 * 0) / 4.
        (Opo(), make_episodes([1, 0], [0, 0], lengths=torch.tensor([1, 3])), [0.75, -0.25]),
        # One group of two has a signal: alpha = 5 / 2.
        (GpgAdvantage(), make_episodes([1, 0, 1, 1, 1], [0, 0, 1, 1, 2]), [1.25, -1.25, 0, 0, 0]),
        # The greedy siblings, with rewards 0.25 and 0, get nothing themselves.
        (
            Remax(),
            make_episodes([1, 0.25, 0, 0.5], [0, 0, 1, 1], greedy=torch.tensor([False, True, True, False])),
            [0.75, 0, 0, 0.5],
        ),
    ],
)
def test_each_estimator_of_sequences_gives_its_numbers(estimator, episodes, expected):
    assert estimator.scores(episodes).tolist() == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("name", ["gpg", "grpo", "dr_grpo", "rloo", "opo", "maxrl", "grpo_passk"])
def test_in_uneven_groups_a_group_of_equal_rewards_gets_exactly_zero(name):
    reward = [0.1, 0.9, 0.3, 0.4, 5.0, 5.0, 5.0, 0.7, 0.2, 0.2, 0.1]
    episodes = make_episodes(reward, [0] * 4 + [1] * 3 + [2] * 4, lengths=torch.arange(1, 12))
    scores = registry.build("advantage", name, {}).scores(episodes)
    assert scores[4:7].tolist() == [0, 0, 0]
    assert scores.count_nonzero() >= 2


def test_pure_credits_nearly_all_to_the_worst_step():
    scores = [0.8, 0.6, -0.4, 0.9]
    episodes = make_episodes([0], [0], steps=[(0, end, score) for end, score in enumerate(scores, 1)])
    credit = min_form(episodes, 0.1).flip(0).cumsum(0).flip(0)
    assert credit.tolist() == pytest.approx([-0.399944, -0.399949, -0.399976, 0.000002], abs=1e-6)
    tokens = make_tokens([[1, 1, 1, 1]])
    advantages = registry.build("advantage", "pure", {"temperature": 0.1})(make_rollouts(episodes, tokens)).advantages
    assert torch.equal(advantages, credit)


def test_strictly_pure_credits_the_worst_step_alone_and_worst_steps_in_equal_shares():
    scores = [(0, 1, 0.8), (0, 2, -0.4), (0, 3, 0.9), (1, 1, -0.2), (1, 2, -0.2)]
    episodes = make_episodes([0, 0], [0, 0], steps=scores)
    assert min_form(episodes, 0.0).tolist() == pytest.approx([0, -0.4, 0, -0.1, -0.1])


def test_remax_without_a_greedy_sibling_says_which_group():
    with pytest.raises(InvariantError, match="group 1 has no greedy member"):
        Remax().scores(make_episodes([1, 0], [0, 1], greedy=torch.tensor([True, False])))


def test_gdpo_normalises_each_reward_before_adding_and_whitens_the_sum():
    episodes = make_episodes(
        [0] * 4, [0, 0, 1, 1], extra={"a": torch.tensor([0.0, 1, 0, 0]), "b": torch.tensor([0.0, 100, 0, 50])}
    )
    scores = Gdpo(weights={"a": 1.0, "b": 3.0}).scores(episodes)
    assert (scores[1] / scores[3]).item() == pytest.approx(4 / 3, rel=1e-5)
    assert scores.mean().item() == pytest.approx(0, abs=1e-12)
    assert scores.std().item() == pytest.approx(1, rel=1e-6)


def test_gdpo_names_the_score_that_is_missing():
    with pytest.raises(InvariantError, match=r"the score style is not among \['outcome', 'reward'\]"):
        Gdpo(weights={"style": 1.0}).scores(make_episodes([1], [0]))


def test_reinforce_pp_discounts_by_policy_token_and_whitens_over_the_batch():
    episodes, tokens = make_episodes([1, 0], [0, 1]), make_tokens([[0, 1, 0, 1], [1, 1]])
    estimate = ReinforcePp(gamma=0.5)(make_rollouts(episodes, tokens))
    assert estimate.returns.tolist() == [0.5, 1, 0, 0]
    expected = (estimate.returns - estimate.returns.mean()) / estimate.returns.std()
    torch.testing.assert_close(estimate.advantages, expected)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("reward", [0.1, 0.37, -0.95, 12.3])
def test_whitened_returns_that_are_all_equal_are_exactly_zero_in_float32(reward, ranks):
    """A sum of 6,000 float32 numbers is rounded, and the rest would be as large as the standard deviation."""
    members = [list(range(rank, 12, ranks)) for rank in range(ranks)]
    episodes, tokens = make_episodes([reward] * 12, [0] * 12), make_tokens([[1] * 500] * 12)
    tokens = replace(tokens, behaviour=tokens.behaviour.float(), proximal=None)

    def advantages(rank, reduce):
        mine = tokens.select(rows(tokens, members[rank]))
        return ReinforcePp()(make_rollouts(episodes, mine, reduce=reduce)).advantages

    for found in on_ranks(ranks, advantages):
        assert found.count_nonzero() == 0


def test_reinforce_pp_baseline_of_equal_rewards_is_exactly_zero():
    episodes, tokens = make_episodes([0.1] * 3, [0] * 3), make_tokens([[1, 1]] * 3)
    assert ReinforcePpBaseline()(make_rollouts(episodes, tokens)).advantages.count_nonzero() == 0


FIVE_AND_TWO = make_tokens([[0, 1, 1, 1, 1], [1, 1]])
TWO_STEPS = [(0, 2, 0.5), (0, 5, 0.5), (1, 2, -0.5)]


@pytest.mark.parametrize(
    ("estimator", "steps", "outcome", "expected"),
    [
        # Sums of 1 - .5, 0 - .5 and .5 - .5 over the steps still to come.
        (
            ProcessGrpo(normalise_std=False),
            [(0, 2, 1.0), (0, 5, 0.0), (1, 2, 0.5)],
            [0, 0],
            [0, -0.5, -0.5, -0.5, 0, 0],
        ),
        # The outcome has a baseline of its own.
        (
            ProcessGrpo(normalise_std=False, outcome_weight=0.5),
            [(0, 2, 0.5), (1, 2, 0.5)],
            [1, 0],
            [0.25, 0.25, 0.25, 0.25, -0.25, -0.25],
        ),
        # Sequence 0 has r* = .25, .25 on steps of 1 and 3 tokens, and b = -.5 / 2; sequence 1 has r* = -.5, b = .5 / 4.
        (Pure(), TWO_STEPS, [0, 0], [0.5 + 1, 0.25 + 0.75, 1, 1, -0.75, -0.75]),
    ],
)
def test_each_estimator_of_steps_gives_its_numbers(estimator, steps, outcome, expected):
    scores = torch.tensor(outcome, dtype=torch.float64)
    episodes = make_episodes([0, 0], [0, 0], steps=steps, outcome=scores, lengths=torch.tensor([4, 2]))
    result = estimator(make_rollouts(episodes, FIVE_AND_TWO)).advantages
    assert result.tolist() == pytest.approx(expected)


def test_pure_refuses_scores_beyond_one():
    episodes = make_episodes([0], [0], steps=[(0, 1, 3.0)])
    with pytest.raises(InvariantError, match=r"reach 3.0.*\[-1, 1\]"):
        Pure()(make_rollouts(episodes, make_tokens([[1]])))


@pytest.mark.parametrize(
    ("steps", "implicit"),
    [([], torch.tensor([9.0, 1, 3, 2], dtype=torch.float64)), ([(0, 2, 0.1), (0, 3, 0.3), (1, 1, 0.2)], None)],
    ids=["a model in the learner", "scores of the labels"],
)
def test_prime_takes_each_source_against_the_others(steps, implicit):
    episodes = make_episodes([0, 0], [0, 0], outcome=torch.tensor([1.0, 0.0]), steps=steps)
    rollouts = make_rollouts(episodes, make_tokens([[0, 1, 1], [1]], implicit=implicit))
    # Rewards .1, .3 against the other's mean .2, and .2 against .2; outcomes +-1.
    raw = torch.tensor([-0.1 + 0.1 + 1, 0.1 + 1, 0 - 1], dtype=torch.float64)
    torch.testing.assert_close(Prime(beta=0.1)(rollouts).advantages, rollouts.whiten(raw))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [[0.5, 0.375], [-0.25, -0.375, 0.25]]),
        ({"zero_tail": False}, [[0.5, 0.375], [-0.25, -0.375, 0]]),
        ({"multi_turn": False}, [[0.5, 3 / 7], [-0.25, 0.25, -9 / 28]]),
        ({"multi_turn": False, "zero_tail": False}, [[0.5, 3 / 7], [-0.25, 0, -9 / 28]]),
    ],
)
def test_the_optimal_token_baseline_weighs_members_by_their_energy_so_far(params, expected):
    """Summands 1 - 2 pi + sum pi^2 with pi = 1/2 and 1/4 and a sum of 1/2: 1/2 and 1. The first member has 1/2, 1, so
    E = 1/2, 3/2, and the return 1; the second has 1, 1/2, 1/2, so E = 1, 3/2, 2, and the return 1/4.
    By policy tokens the baselines are (1/2 + 1/4) / (3/2) = 1/2, (3/2 + 3/8) / 3 = 5/8, and at the second's last token
    0, or its own 1/4. By position the first has none at 1, and a tool token there: 1/2, 0 or 1/4, and at 2
    (3/2 + 2/4) / (7/2) = 4/7."""
    episodes = make_episodes([1, 0.25], [0, 0], lengths=torch.tensor([2, 3]))
    policy = torch.tensor([9, 0.5, 9, 0.25, 0.25, 0.5, 0.5], dtype=torch.float64)
    tokens = make_tokens(
        [[0, 1, 0, 1], [1, 1, 1]], proximal=policy.log(), collisions=torch.full((7,), 0.5, dtype=torch.float64)
    )
    result = OptimalTokenBaseline(**params)(make_rollouts(episodes, tokens)).advantages
    assert result.tolist() == pytest.approx([each for member in expected for each in member], abs=1e-7)


@pytest.mark.parametrize("zero_tail", [True, False])
def test_the_optimal_token_baseline_of_a_member_alone_is_nothing(zero_tail):
    half = torch.full((3,), 0.5, dtype=torch.float64)
    tokens = make_tokens([[0, 1, 1]], proximal=half.log(), collisions=half)
    part = OptimalTokenBaseline(zero_tail=zero_tail)
    assert part(make_rollouts(make_episodes([0.7], [0]), tokens)).advantages.tolist() == [0.7, 0.7]


@pytest.mark.parametrize(
    ("names", "expected"),
    [("gpg rloo opo oapl maxrl grpo_passk reinforce_pp_baseline", [0, 0, 0]), ("grpo dr_grpo", [0, 0.7, 0.7])],
)
def test_a_member_alone_in_its_group_gets_nothing_or_its_reward(names, expected):
    episodes, tokens = make_episodes([0.7], [0], lengths=torch.tensor([2])), make_tokens([[0, 1, 1]])
    for name in names.split():
        assert advantages_of(name, episodes, tokens).tolist() == expected, name


@pytest.mark.slow
@given(SEEDS, st.floats(0, 1), st.floats(0, 1), CAPS, CAPS, CAPS)
@settings(max_examples=40, deadline=None)
def test_vtrace_equals_its_definition_as_a_double_sum(seed, gamma, lam, rho_bar, c_bar, rho_pg_bar):
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@given(seed=SEEDS, junk=st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30]))
@settings(max_examples=8, deadline=None)
def test_tool_tokens_never_change_an_advantage(name, seed, junk):
    episodes, tokens = random_batch(seed)
    spoilt = {
        field: torch.where(tokens.mask, getattr(tokens, field), junk)
        for field in ("behaviour", "proximal", "reference", "values", "implicit", "collisions")
    }
    plain = advantages_of(name, episodes, tokens)
    assert torch.equal(plain, advantages_of(name, episodes, replace(tokens, **spoilt)))
    assert plain[~tokens.mask].count_nonzero() == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@given(seed=SEEDS)
@settings(max_examples=8, deadline=None)
def test_more_tool_tokens_change_nothing_on_the_others(name, seed):
    episodes, tokens = random_batch(seed)
    # Twice as many tool tokens before each sequence; steps end later by as many.
    doubled = torch.cat(
        [
            torch.cat([mine[~tokens.mask[mine]][:1].repeat(3), mine])
            for mine in (rows(tokens, [row]) for row in range(episodes.count))
        ]
    )
    longer = tokens.select(doubled)
    starts = torch.ones_like(longer.sequence, dtype=torch.bool)
    starts[1:] = longer.sequence.diff() != 0
    first = starts.nonzero().squeeze(1)
    longer = replace(longer, position=torch.arange(len(doubled)) - first[longer.sequence])
    moved = replace(episodes, step_end=episodes.step_end + 3)
    plain, other = advantages_of(name, episodes, tokens), advantages_of(name, moved, longer)
    torch.testing.assert_close(plain[tokens.mask], other[longer.mask], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@given(seed=SEEDS, data=st.data())
@settings(max_examples=8, deadline=None)
def test_permuting_sequences_permutes_advantages(name, seed, data):
    episodes, tokens = random_batch(seed)
    permutation = data.draw(st.permutations(range(episodes.count)))
    index = torch.tensor(permutation)
    place = rows(tokens, permutation)
    back = torch.empty_like(index).index_copy_(0, index, torch.arange(len(index)))
    moved = tokens.select(place)
    moved = replace(moved, sequence=back[moved.sequence])
    order = back[episodes.step_sequence].argsort(stable=True)
    shuffled = replace(
        episodes,
        **{field: getattr(episodes, field)[index] for field in ("group", "reward", "outcome", "lengths", "greedy")},
        step_scores=episodes.step_scores[order],
        step_sequence=back[episodes.step_sequence][order],
        step_end=episodes.step_end[order],
        extra={key: values[index] for key, values in episodes.extra.items()},
    )
    plain, other = advantages_of(name, episodes, tokens), advantages_of(name, shuffled, moved)
    torch.testing.assert_close(plain[place], other, rtol=1e-10, atol=1e-10)


def test_the_critics_targets_are_returns_whether_advantages_are_whitened_or_not():
    episodes, tokens = random_batch(3)
    rollouts = make_rollouts(episodes, tokens)
    plain, whitened = Gae()(rollouts), Gae(whiten=True)(rollouts)
    assert plain.returns is not None
    assert whitened.returns is not None
    assert torch.equal(whitened.returns, plain.returns)
    assert not torch.allclose(whitened.advantages, plain.advantages)


def test_opo_weighs_the_members_of_a_group_by_their_share_of_its_own_tokens():
    # Of 4 tokens in each group, the member with reward 1 has 1 and 2: baselines 1/4 and 1/2.
    episodes = make_episodes([1, 0, 1, 0], [0, 0, 1, 1], lengths=torch.tensor([1, 3, 2, 2]))
    assert Opo().scores(episodes).tolist() == pytest.approx([0.75, -0.25, 0.5, -0.5])
