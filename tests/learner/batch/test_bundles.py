"""Groups are kept together in passes where computing their prefixes once saves more than it costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncrl.learner.batch.bundles import schedule_shared
from asyncrl.learner.batch.schedule import Passes, schedule


def costs_of(lengths: Sequence[int]) -> NDArray[np.float64]:
    tokens = np.asarray(lengths, np.float64)
    return tokens + tokens * tokens / 4096


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """The lengths of sequences, and how many tokens each shares with the one before it."""
    lengths, shared = [], []
    for _ in range(draw(st.integers(1, 5))):
        prompt = draw(st.integers(0, 100))
        for member in range(draw(st.integers(1, 6))):
            lengths.append(prompt + draw(st.integers(1, 100)))
            shared.append(prompt if member else 0)
    return lengths, shared


def computed(members: Sequence[int], lengths: Sequence[int], shared: Sequence[int]) -> int:
    """The tokens that a pass of these sequences computes."""
    return sum(lengths[each] for each in members) - sum(shared[b] for a, b in pairwise(members) if b == a + 1)


def lockstep(parts: list[Passes], lengths: Sequence[int], shared: Sequence[int]) -> float:
    def cost(members: Sequence[int]) -> float:
        alike = [shared[b] for a, b in pairwise(members) if b == a + 1]
        return float(costs_of([lengths[each] for each in members]).sum() - costs_of(alike).sum())

    return sum(max(map(cost, each)) for each in zip(*parts, strict=True))


@pytest.mark.slow
@given(groups(), st.integers(1, 4), st.integers(1, 3), st.integers(20, 400))
def test_a_schedule_of_groups_has_every_sequence_once_within_the_limit(group, ranks, minibatches, limit):
    lengths, shared = group
    whole = schedule(lengths, costs_of(lengths).tolist(), ranks, minibatches, limit)
    found = schedule_shared(lengths, shared, costs_of, ranks, minibatches, limit)
    assert len(found) == len(whole)
    for parts, expected in zip(found, whole, strict=True):
        assert sorted(i for passes in parts for each in passes for i in each) == sorted(
            i for passes in expected for each in passes for i in each
        )
        assert len(parts) == ranks
        assert len({len(passes) for passes in parts}) == 1
        for members in (each for passes in parts for each in passes):
            assert members == sorted(members)
            assert len(members) <= 1 or computed(members, lengths, shared) <= limit
        if len(parts[0]) >= len(expected[0]):
            assert lockstep(parts, lengths, shared) <= lockstep(expected, lengths, shared) * (1 + 1e-9)


@pytest.mark.slow
@given(groups(), st.integers(1, 4), st.integers(20, 400))
def test_sequences_that_share_nothing_are_scheduled_as_ever(group, ranks, limit):
    lengths, shared = group
    expected = schedule(lengths, costs_of(lengths).tolist(), ranks, 1, limit)
    assert schedule_shared(lengths, [0] * len(shared), costs_of, ranks, 1, limit) == expected


def test_groups_stay_together_where_prompts_are_long_and_spread_over_ranks_where_they_are_short():
    lengths, long, short = [1100, 1200, 1300, 1400] * 4, [0, 1000, 1000, 1000] * 4, [0, 10, 10, 10] * 4
    (parts,) = schedule_shared(lengths, long, costs_of, 2, 1, 4096)
    assert [len(passes) for passes in parts] == [1, 1]
    assert all(members[::4] == [each for each in members if each % 4 == 0] for ((members),) in parts)
    (parts,) = schedule_shared(lengths[:4], short[:4], costs_of, 4, 1, 4096)
    assert sorted(members for (members,) in parts) == [[0], [1], [2], [3]]
