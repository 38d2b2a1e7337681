from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.packing import balance, pack, schedule

lengths_of_batch = st.lists(st.integers(1, 200), min_size=1, max_size=40)
ranks_of_run = st.integers(1, 5)
splits = st.integers(1, 4)
limits = st.integers(1, 300)


def test_two_ranks_of_the_golden_batch_get_170_tokens_each():
    lengths = [100, 90, 80, 70]
    shares = balance(lengths, range(4), 2)
    assert [sum(lengths[i] for i in share) for share in shares] == [170, 170]
    assert schedule(lengths, 2, 1, 100) == [[[[0], [3]], [[1], [2]]]]


@given(lengths_of_batch, ranks_of_run, splits, limits)
def test_every_sequence_is_in_exactly_one_pass(lengths, ranks, minibatches, limit):
    parts = schedule(lengths, ranks, minibatches, limit)
    assert sorted(i for mini in parts for rank in mini for members in rank for i in members) == list(
        range(len(lengths))
    )


@given(lengths_of_batch, ranks_of_run, splits, limits)
def test_all_ranks_have_the_same_number_of_passes(lengths, ranks, minibatches, limit):
    for mini in schedule(lengths, ranks, minibatches, limit):
        assert len(mini) == ranks
        assert len({len(passes) for passes in mini}) == 1


@given(lengths_of_batch, limits)
def test_a_pass_is_within_the_limit_unless_one_sequence_alone_exceeds_it(lengths, limit):
    for members in pack(lengths, range(len(lengths)), limit):
        assert sum(lengths[i] for i in members) <= limit or len(members) == 1
        assert members == sorted(members)


@given(lengths_of_batch, ranks_of_run, splits, limits)
def test_minibatches_are_the_same_whatever_the_ranks(lengths, ranks, minibatches, limit):
    def members(count: int) -> list[list[int]]:
        parts = schedule(lengths, count, minibatches, limit)
        return [sorted(i for rank in mini for passed in rank for i in passed) for mini in parts]

    assert members(ranks) == members(1)
    assert [i for mini in members(1) for i in mini] == list(range(len(lengths)))


@given(lengths_of_batch, ranks_of_run)
def test_shares_differ_by_no_more_than_the_longest_sequence(lengths, ranks):
    loads = [sum(lengths[i] for i in share) for share in balance(lengths, range(len(lengths)), ranks)]
    assert max(loads) - min(loads) <= max(lengths)


@given(lengths_of_batch, limits)
def test_passes_are_fewer_than_twice_the_least_possible(lengths, limit):
    lengths = [min(each, limit) for each in lengths]
    assert len(pack(lengths, range(len(lengths)), limit)) <= 2 * sum(lengths) / limit + 1
