"""The sampled tokens that wait until their sequence needs them."""

from __future__ import annotations

import math

import numpy as np

from asyncrl.engine.graphed.unread import ROOM, UnreadTokens
from asyncrl.engine.passes import SampledTokens
from asyncrl.engine.scheduler import Request, Slot


def slot(index: int, limit: int = 1000, stop: tuple[int, ...] = (2,)) -> Slot:
    prompt = [5, 6, 7]
    return Slot(index, Request(f"s{index}", np.array(prompt, np.int32), 1.0, limit, frozenset(stop), 0), prompt)


def added(unread: UnreadTokens, slots: list[Slot], tokens: list[int], logprob: float = -1.0) -> list[int]:
    indices = np.array([each.index for each in slots])
    return unread.add(indices, np.array(tokens), np.full(len(tokens), logprob))


def test_a_sequence_is_due_at_one_of_its_own_stop_tokens_at_its_limit_and_where_its_logits_are_not_finite() -> None:
    unread, slots = UnreadTokens(5), [slot(4, stop=(2, 3)), slot(0), slot(2, limit=2, stop=())]
    for each in slots:
        unread.begin(each)
    assert added(unread, slots, [9, 3, 2]) == []
    assert added(unread, slots, [3, 3, 2]) == [0, 2]
    assert added(unread, slots[1:2], [9], math.nan) == [0]


def test_a_sequence_gets_every_token_since_the_last_time_and_all_but_the_newest_count_as_computed() -> None:
    unread, one = UnreadTokens(2), slot(1)
    unread.begin(one)
    assert unread.hand_out(one) is None
    for token in (9, 8, 2):
        added(unread, [one], [token])
    assert unread.hand_out(one) == SampledTokens(one, [9, 8, 2], [-1.0] * 3, ())
    # The newest token's keys are not computed yet.
    assert one.cached == 3 + 2
    assert unread.hand_out(one) is None


def test_a_long_turn_is_handed_out_in_parts_and_a_new_sequence_has_no_tokens_of_the_old_one() -> None:
    unread, one = UnreadTokens(1), slot(0)
    unread.begin(one)
    due = [added(unread, [one], [9]) for _ in range(ROOM)]
    assert due == [[]] * (ROOM - 1) + [[0]]
    found = unread.hand_out(one)
    assert found is not None
    assert found.tokens == [9] * ROOM
    added(unread, [one], [9])
    other = slot(0, limit=1)
    unread.begin(other)
    assert added(unread, [other], [9]) == [0]
    assert unread.hand_out(other) == SampledTokens(other, [9], [-1.0], ())
