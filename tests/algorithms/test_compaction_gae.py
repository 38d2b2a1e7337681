"""The advantage compaction_gae: credit over the branches of an episode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantages.compaction_gae import CompactionGae
from asyncrl.algorithms.advantages.gae import Gae
from asyncrl.algorithms.batch import Episodes, Tokens
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.errors import ConfigError
from tests.algorithms.support import make_episodes, make_rollouts, make_tokens, random_batch

SEEDS = st.integers(0, 10_000)
RATES = st.floats(0.1, 1)
MASKS = [[0, 1, 1, 0, 1], [0, 1]]
BRANCHES = torch.tensor([0, 0, 0, 1, 1, 0, 0])
VALUES = torch.tensor([9, 0.2, 0.4, 9, 0.3, 9, 0.5], dtype=torch.float64)


def branched(tokens: Tokens, seed: int) -> Tokens:
    """The tokens, whose sequences have several branches of any lengths, some of them without policy tokens."""
    chance = torch.rand(len(tokens.mask), generator=torch.Generator().manual_seed(seed))
    begun = ((chance < 0.25) & (tokens.position > 0)).long().cumsum(0)
    first = begun[tokens.position == 0]
    return replace(tokens, branch=begun - first[tokens.sequence])


def by_loops(episodes: Episodes, tokens: Tokens, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """The advantages and returns of the policy tokens, in plain Python."""
    advantages, returns = [], []
    for row in range(episodes.count):
        places = [place for place in range(len(tokens.mask)) if tokens.sequence[place] == row and tokens.mask[place]]
        branches = [int(tokens.branch[place]) for place in places]
        values = [float(tokens.values[place]) for place in places]
        for at, branch in enumerate(branches):
            own = [each for each in range(at, len(places)) if branches[each] == branch]
            local = 0.0
            for distance, each in enumerate(own):
                is_last = each == own[-1]
                target = float(episodes.reward[row]) if is_last else gamma * values[each + 1]
                local += (gamma * lam) ** distance * (target - values[each])
            advantages.append((gamma * lam) ** sum(other > branch for other in branches) * local)
            returns.append(local + values[at])
    return advantages, returns


def test_each_branch_ends_with_the_reward_and_earlier_ones_are_discounted_by_the_tokens_after_them():
    """gamma lam = .45. Branch 0: delta = .9 * .4 - .2 = .16 and 1 - .4 = .6, so A' = .16 + .45 * .6 = .43 and .6. One
    token follows, so A = .1935 and .27. Branch 1: 1 - .3 = .7. The other episode: 2 - .5."""
    tokens = make_tokens(MASKS, values=VALUES, branch=BRANCHES)
    estimate = CompactionGae(gamma=0.9, lam=0.5)(make_rollouts(make_episodes([1, 2], [0, 0]), tokens))
    assert estimate.advantages.tolist() == pytest.approx([0.1935, 0.27, 0.7, 1.5])
    assert estimate.returns.tolist() == pytest.approx([0.63, 1, 1, 2])


def test_alpha_sets_lambda_by_the_length_of_the_episode():
    """alpha = 1.5: lambda = 1 - 1 / 4.5 = 7/9 for three policy tokens, and 1/3 for one."""
    tokens = make_tokens(MASKS, values=torch.zeros(7, dtype=torch.float64), branch=BRANCHES)
    estimate = CompactionGae(alpha=1.5)(make_rollouts(make_episodes([1, 2], [0, 0]), tokens))
    assert estimate.advantages.tolist() == pytest.approx([49 / 81, 7 / 9, 1, 2])


@given(SEEDS, RATES, RATES)
@settings(max_examples=30, deadline=None)
def test_the_advantages_again_by_loops(seed, gamma, lam):
    episodes, tokens = random_batch(seed)
    tokens = branched(tokens, seed)
    estimate = CompactionGae(gamma=gamma, lam=lam)(make_rollouts(episodes, tokens))
    advantages, returns = by_loops(episodes, tokens, gamma, lam)
    assert estimate.advantages.tolist() == pytest.approx(advantages)
    assert estimate.returns.tolist() == pytest.approx(returns)


@given(SEEDS, RATES, RATES, st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_an_episode_of_one_branch_has_the_advantages_of_gae(seed, gamma, lam, step_weight):
    episodes, tokens = random_batch(seed)
    params = {"gamma": gamma, "lam": lam, "step_weight": step_weight}
    expected = Gae(**params)(make_rollouts(episodes, tokens))
    for branch in (None, torch.zeros_like(tokens.sequence)):
        found = CompactionGae(**params)(make_rollouts(episodes, replace(tokens, branch=branch)))
        torch.testing.assert_close(found.advantages, expected.advantages)
        torch.testing.assert_close(found.returns, expected.returns)


@given(SEEDS, RATES, RATES)
@settings(max_examples=20, deadline=None)
def test_without_values_the_reward_is_discounted_by_the_tokens_up_to_the_end_however_the_episode_is_cut(
    seed, gamma, lam
):
    """Equation 15 of the paper."""
    episodes, tokens = random_batch(seed)
    tokens = replace(tokens, values=torch.zeros_like(tokens.values))
    whole, cut = (
        CompactionGae(gamma=gamma, lam=lam)(make_rollouts(episodes, each)).advantages
        for each in (tokens, branched(tokens, seed))
    )
    torch.testing.assert_close(cut, whole)


def test_a_penalty_of_a_token_stays_in_its_branch():
    tokens = make_tokens(MASKS, values=torch.zeros(7, dtype=torch.float64), branch=BRANCHES)
    penalty = torch.tensor([0.0, 0.0, 0.5, 0.0], dtype=torch.float64)
    rollouts = make_rollouts(make_episodes([1, 1], [0, 0]), tokens, penalty=penalty)
    assert CompactionGae(lam=1.0)(rollouts).advantages.tolist() == pytest.approx([1, 1, 0.5, 1])


def test_branches_without_policy_tokens_and_batches_without_any_are_allowed():
    tokens = make_tokens([[1, 0, 1], [0, 0]], values=torch.zeros(5, dtype=torch.float64))
    tokens = replace(tokens, branch=torch.tensor([0, 1, 2, 0, 1]))
    view = PolicyTokens.of(tokens)
    assert view.branches(tokens.branch).lengths.tolist() == [1, 1]
    assert view.branches(None).lengths.tolist() == [2]
    none = make_tokens([[0, 0]], values=torch.zeros(2, dtype=torch.float64), branch=torch.tensor([0, 1]))
    for each in (none, replace(none, branch=None)):
        estimate = CompactionGae()(make_rollouts(make_episodes([1], [0]), each))
        assert estimate.advantages.tolist() == []


def test_lam_and_alpha_exclude_each_other():
    with pytest.raises(ConfigError, match=r"compaction_gae: lam=0.9: alpha=1.5 sets lambda; leave lam at 1.0"):
        CompactionGae(lam=0.9, alpha=1.5)
    with pytest.raises(ConfigError, match=r"alpha=0.5: it must be a number in \[1, inf\) or null"):
        CompactionGae(alpha=0.5)
