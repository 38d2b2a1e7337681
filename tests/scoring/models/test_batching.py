import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.scoring.models.batching import micro_batches, share_prefixes

LENGTHS = st.lists(st.integers(1, 50), max_size=7)


@given(LENGTHS, st.integers(1, 200), st.integers(0, 60), st.none() | st.integers(1, 4))
def test_micro_batches_hold_everything_once_within_both_bounds_at_the_least_cost(
    lengths, max_tokens, pass_cost, max_inputs
):
    def padded(batch):
        return len(batch) * max(lengths[index] for index in batch)

    def fits(batch):
        return len(batch) == 1 or (padded(batch) <= max_tokens and len(batch) <= (max_inputs or len(batch)))

    def cost(batches):
        return sum(padded(batch) + pass_cost for batch in batches)

    batches = micro_batches(lengths, max_tokens, pass_cost, max_inputs)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(fits(batch) for batch in batches)
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    assert cost(batches) == min(cost(split) for split in runs(order) if all(map(fits, split)))


def saved(sets, cost):
    return sum((len(members) - 1) * prefix - cost for prefix, members in sets if prefix)


def runs(items):
    """All ways to cut a list into runs."""
    if not items:
        yield []
    for size in range(1, len(items) + 1):
        for tail in runs(items[size:]):
            yield [items[:size], *tail]


def common(ids, members):
    shortest = min(len(ids[index]) for index in members)
    return next((at for at in range(shortest) if len({ids[index][at] for index in members}) > 1), shortest)


IDS = st.lists(st.lists(st.integers(0, 1), max_size=5), max_size=5)


@pytest.mark.slow
@given(IDS, st.integers(0, 4))
def test_no_other_split_of_the_sorted_inputs_shares_more(ids, cost):
    sets = share_prefixes(ids, cost)
    assert sorted(index for _, members in sets for index in members) == list(range(len(ids)))
    for prefix, members in sets:
        assert prefix <= common(ids, members)
    order = sorted(range(len(ids)), key=ids.__getitem__)
    best = max(sum(max(0, (len(m) - 1) * common(ids, m) - cost) for m in split) for split in runs(order))
    assert saved(sets, cost) == best


def test_members_of_a_group_share_their_prompt_and_groups_what_they_can():
    system, first, second = [9] * 50, [1] * 30, [2] * 40
    ids = [[*system, *first, 1, 2], [*system, *second, 3], [*system, *first, 4], [*system, *second, 5, 6]]
    assert sorted(share_prefixes(ids, 10)) == [(80, [0, 2]), (90, [1, 3])]
    assert share_prefixes(ids, 60) == [(50, [0, 2, 1, 3])]
    assert [prefix for prefix, _ in share_prefixes(ids, 1000)] == [0]
