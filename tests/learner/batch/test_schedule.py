from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.batch.bins import first_fit_decreasing, karmarkar_karp
from asyncrl.learner.batch.schedule import COMPARED, EVEN, Passes, schedule

lengths_of_batch = st.lists(st.integers(1, 200), min_size=1, max_size=40)
ranks_of_run = st.integers(1, 5)
limits = st.integers(1, 300)
squares = st.floats(0, 0.1)


def costs_of(lengths: list[int], square: float) -> list[float]:
    return [length + square * length * length for length in lengths]


def heavy_tailed(count: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(7.0, 1.1, count)
    return drawn.clip(64, 16384).astype(int).tolist()


def measure(parts: list[Passes], costs: list[float]) -> tuple[int, float, float]:
    """Passes, the largest cost of a rank, and the cost of passes in lockstep."""
    passes = max(map(len, parts))
    by_rank = [[sum(costs[i] for i in each) for each in rank] + [0.0] * (passes - len(rank)) for rank in parts]
    return passes, max(map(sum, by_rank)), sum(map(max, zip(*by_rank, strict=True)))


def test_two_ranks_of_the_golden_batch_get_170_tokens_each():
    lengths = [100, 90, 80, 70]
    assert schedule(lengths, costs_of(lengths, 0), 2, 1, 100) == [[[[0], [3]], [[1], [2]]]]


@pytest.mark.slow
@given(lengths_of_batch, squares, ranks_of_run, st.integers(1, 4), limits)
def test_a_schedule_has_every_sequence_once_and_as_many_passes_on_every_rank(
    lengths, square, ranks, minibatches, limit
):
    def members(count: int) -> list[list[int]]:
        parts = schedule(lengths, costs_of(lengths, square), count, minibatches, limit)
        return [sorted(i for rank in minibatch for passed in rank for i in passed) for minibatch in parts]

    assert members(ranks) == members(1)
    assert [i for minibatch in members(1) for i in minibatch] == list(range(len(lengths)))
    for minibatch in schedule(lengths, costs_of(lengths, square), ranks, minibatches, limit):
        assert len(minibatch) == ranks
        assert len({len(passes) for passes in minibatch}) == 1
        for members_of_pass in (each for passes in minibatch for each in passes):
            assert sum(lengths[i] for i in members_of_pass) <= limit or len(members_of_pass) == 1
            assert members_of_pass == sorted(members_of_pass)


def test_karmarkar_karp_and_first_fit_decreasing_are_those_of_the_textbook():
    numbers = [8, 7, 6, 5, 4]
    assert sorted(sum(numbers[i] for i in part) for part in karmarkar_karp(numbers, range(5), 2)) == [14, 16]
    assert first_fit_decreasing(numbers, range(5), 12) == [[0, 4], [1, 3], [2]]


@pytest.mark.slow
@given(lengths_of_batch, squares, ranks_of_run, limits)
def test_no_schedule_is_worse_than_karmarkar_karp_and_first_fit_decreasing(lengths, square, ranks, limit):
    costs = costs_of(lengths, square)
    (found,) = schedule(lengths, costs, ranks, 1, limit)
    decreasing = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    shards = [sorted(shard, key=lambda i: -lengths[i]) for shard in karmarkar_karp(costs, decreasing, ranks)]
    reference = [first_fit_decreasing(lengths, shard, limit) for shard in shards]
    passes, largest, lockstep = measure(found, costs)
    most, rank, other = measure(reference, costs)
    assert passes <= most
    assert largest <= max(rank, EVEN * sum(costs) / ranks) * (1 + 1e-9)
    assert lockstep <= other * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("count", [COMPARED, COMPARED + 1, 4096])
def test_ranks_of_many_heavy_tailed_sequences_cost_the_same_to_two_percent(count: int, ranks: int):
    lengths = heavy_tailed(count, 0)
    costs = costs_of(lengths, 1e-4)
    (found,) = schedule(lengths, costs, ranks, 1, 16384)
    assert sorted(i for rank in found for passed in rank for i in passed) == list(range(count))
    assert max(sum(lengths[i] for i in passed) for rank in found for passed in rank) <= 16384
    loads = [sum(costs[i] for passed in rank for i in passed) for rank in found]
    assert max(loads) <= EVEN * sum(loads) / ranks


def test_one_rank_has_fewer_passes_than_first_fit_where_sequences_fill_passes_exactly():
    lengths = [6, 3, 3, 2, 2, 2, 2]
    (((first, second),),) = schedule(lengths, costs_of(lengths, 0), 1, 1, 10)
    assert sorted([*first, *second]) == list(range(7))
    assert len(first_fit_decreasing(lengths, range(7), 10)) == 3
