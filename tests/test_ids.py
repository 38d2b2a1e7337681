"""Ids say what they name: the shard, the attempt, and whether an evaluation made them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import ids
from asyncrl.errors import RefusedError

NUMBERS = st.integers(0, 10**9 - 1)


@given(number=NUMBERS, member=st.integers(0, 99), attempt=st.integers(0, 9), shards=st.integers(1, 16))
def test_a_ticket_says_its_shard_and_its_attempt(number: int, member: int, attempt: int, shards: int) -> None:
    evaluation = ids.evaluation_group(member, number, attempt)
    assert ids.held_out_row(evaluation) == number
    assert ids.evaluated_version(ids.ticket_id(evaluation, 0, 1)) == member
    for group in (ids.feed_group(number), ids.again_group(number), evaluation):
        ticket = ids.ticket_id(group, member, attempt)
        assert ids.attempt_of(ticket) == attempt
        assert ids.shard_of(ticket, shards) == ids.shard_of(group, shards) == number % shards
        assert ids.is_evaluation(ticket) == group.startswith("e")


@given(first=NUMBERS, second=NUMBERS)
def test_groups_of_the_feed_sort_in_the_order_in_which_they_were_opened(first: int, second: int) -> None:
    earlier, later = (ids.ticket_id(ids.feed_group(number), 0, 0) for number in sorted((first, second)))
    again = ids.ticket_id(ids.again_group(0), 0, 0)
    assert sorted([again, later, earlier], key=ids.opening_order) == [earlier, later, again]


@pytest.mark.parametrize("name", ["", "nonsense", "tt.3.0"])
def test_what_is_no_id_has_no_shard(name: str) -> None:
    with pytest.raises(RefusedError, match=r"such as t000000012\.3\.0"):
        ids.shard_of(name, 2)
