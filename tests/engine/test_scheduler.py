"""The scheduler against a model of the cache that remembers where and when each token was computed.

This must hold:

- A chunk attends only to its own sequence, computed after the last `forget`, or for its own session if that was kept.
- Requests get slots in the order they came.
- A pass has every decoding sequence, and no more prompt tokens than allowed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.engine.scheduler import Request, Scheduler, _common_prefix
from asyncrl.errors import EngineError

SLOTS, PREFILL, STOP = 3, 5, 0
SESSIONS = st.sampled_from([f"s{i}" for i in range(6)])
TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=9)


def request(session: str, tokens: list[int], limit: int = 4) -> Request:
    return Request(session, np.array(tokens, np.int32), 1.0, limit, frozenset([STOP]), 0)


class Cached(NamedTuple):
    """A token of the cache: after how many calls of `forget` it was computed, and for whom, or copied for whom."""

    token: int
    version: int
    session: str


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(SLOTS, PREFILL, self.copy)
        self.requests: list[Request] = []
        self.history: dict[str, list[int]] = {}
        self.cache: list[dict[int, Cached]] = [{} for _ in range(SLOTS)]
        self.version = 0
        self.admitted: list[Request] = []

    def copy(self, source: int, slot: int, count: int) -> None:
        assert source != slot
        copied = {index: self.cache[source][index] for index in range(count)}
        assert all(each.version == self.version for each in copied.values())
        owner = next(each.request.session for each in self.scheduler.running if each.index == slot)
        self.cache[slot].update({index: each._replace(session=owner) for index, each in copied.items()})

    def active(self, session: str) -> Request | None:
        return next((r for r in self.requests if r.session == session and not r.future.done()), None)

    @rule(session=SESSIONS, tokens=TOKENS, limit=st.integers(1, 6), grow=st.booleans())
    def submit(self, session: str, tokens: list[int], limit: int, grow: bool) -> None:
        new = request(session, self.history.get(session, []) * grow + tokens, limit)
        if self.active(session):
            with pytest.raises(EngineError, match="already"):
                self.scheduler.submit(new)
        else:
            self.scheduler.submit(new)
            self.requests.append(new)

    @precondition(lambda self: self.scheduler.busy)
    @rule(token=st.integers(STOP, 3))
    def step(self, token: int) -> None:
        work = self.scheduler.plan()
        assert work, "a busy scheduler must have something to compute"
        running = self.scheduler.running
        self.admitted += [slot.request for slot in running if slot.request not in self.admitted]
        assert {slot.index for slot in running if len(slot.tokens) - slot.cached == 1} <= {c.slot for _, c in work}
        singles = [chunk.end - chunk.start == 1 for _, chunk in work]
        assert singles == sorted(singles, reverse=True)
        assert len({chunk.slot for _, chunk in work}) == len(work) <= SLOTS
        assert sum(chunk.end - chunk.start for s, chunk in work if len(s.tokens) - s.cached > 1) <= PREFILL
        for slot, chunk in work:
            seen = self.cache[slot.index]
            used, session = [seen[i] for i in range(chunk.start)], slot.request.session
            assert [each.token for each in used] == slot.tokens[: chunk.start]
            assert all(each.version == self.version or each.session == session for each in used)
            computed = range(chunk.start, chunk.end)
            seen.update({i: Cached(slot.tokens[i], self.version, session) for i in computed})
            slot.cached = chunk.end
            if chunk.end == len(slot.tokens):
                self.scheduler.append(slot, [token], [-1.0], 7)
                self.history[slot.request.session] = list(slot.tokens)

    @rule(keep=st.booleans())
    def forget(self, keep: bool) -> None:
        kept = self.scheduler.forget(keep)
        assert keep or not kept
        assert {slot.index for slot in self.scheduler.running} <= kept or not keep
        self.version += 1
        self.cache = [seen if index in kept else {} for index, seen in enumerate(self.cache)]

    @rule(session=SESSIONS)
    def release(self, session: str) -> None:
        current = self.active(session)
        self.scheduler.release(session)
        if current:
            assert current.future.result(0).finish_reason == "abort"

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(self.requests))
        other = self.active(chosen.session)
        self.scheduler.cancel(chosen)
        assert chosen.future.done()
        if other is not chosen and other is not None:
            assert not other.future.done()

    @invariant()
    def ends_are_true(self) -> None:
        for each in self.requests:
            if each.future.done():
                got = each.future.result(0)
                assert len(got.tokens) == len(got.logprobs) == len(got.versions) <= each.limit
                assert (got.finish_reason == "stop") == (STOP in got.tokens[-1:])
                assert STOP not in got.tokens[:-1]
                assert got.finish_reason != "length" or len(got.tokens) == each.limit

    @invariant()
    def slots_are_given_in_order(self) -> None:
        order = [self.requests.index(each) for each in self.admitted]
        assert order == sorted(order)
        assert len(self.scheduler.running) <= SLOTS

    def teardown(self) -> None:
        self.scheduler.fail_all(EngineError("over"))
        assert all(each.future.done() for each in self.requests)
        assert not self.scheduler.busy


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_the_scheduler_keeps_its_promises = SchedulerMachine.TestCase


def no_copy(source: int, slot: int, count: int) -> None:
    """Do nothing: only the plan matters."""


def run(scheduler: Scheduler, passes: int = 1) -> list[list[tuple[str, int, int]]]:
    """The chunks of each of the next passes: session, start and end."""
    seen = []
    for _ in range(passes):
        work = scheduler.plan()
        seen.append([(slot.request.session, chunk.start, chunk.end) for slot, chunk in work])
        for slot, chunk in work:
            slot.cached = chunk.end
            if chunk.end == len(slot.tokens):
                scheduler.append(slot, [1], [-1.0], 0)
    return seen


def test_a_turn_that_rewrites_its_past_computes_from_the_first_difference():
    scheduler = Scheduler(1, 100, no_copy)
    scheduler.submit(request("a", [1, 2, 3, 1], limit=1))
    run(scheduler)
    scheduler.submit(request("a", [1, 2, 2, 1], limit=1))
    assert run(scheduler) == [[("a", 2, 4)]]
    scheduler.submit(request("a", [1, 2], limit=1))
    assert run(scheduler) == [[("a", 1, 2)]]


def test_the_session_idle_longest_loses_its_slot():
    scheduler = Scheduler(2, 100, no_copy)
    for session in ("old", "young"):
        scheduler.submit(request(session, [len(session), 2, 3], limit=1))
        run(scheduler)
    scheduler.submit(request("new", [4], limit=1))
    scheduler.submit(request("young", [5, 2, 3, 1, 2], limit=1))
    assert run(scheduler) == [[("new", 0, 1), ("young", 3, 5)]]
    scheduler.submit(request("old", [2, 2, 3, 1], limit=1))
    assert run(scheduler) == [[("old", 0, 4)]]


def test_a_prefix_that_another_slot_has_computed_is_copied_also_after_forget_and_from_idle_sessions():
    copies = list[tuple[int, int, int]]()
    scheduler = Scheduler(3, 6, lambda *each: copies.append(each))
    scheduler.submit(request("a", [1, 2, 3, 1], limit=1))
    run(scheduler)
    scheduler.submit(request("b", [1, 2, 3, 2, 2], limit=9))
    scheduler.submit(request("c", [1, 2, 3, 2], limit=9))
    # "b" has only its own copy so far when "c" takes that.
    assert run(scheduler) == [[("c", 3, 4), ("b", 3, 5)]]
    assert copies == [(0, 1, 3), (1, 2, 3)]
    scheduler.forget()
    copies.clear()
    assert run(scheduler, 2) == [[("b", 0, 6)], [("b", 6, 7), ("c", 4, 5)]]
    assert copies == [(1, 2, 4)]


def test_members_that_arrive_together_compute_their_prompt_once():
    copies = list[tuple[int, int, int]]()
    scheduler = Scheduler(4, 100, lambda *each: copies.append(each))
    for session in ("a", "b", "c"):
        scheduler.submit(request(session, [1, 2, 3, 1, 2], limit=9))
    scheduler.submit(request("other", [3, 2, 1], limit=9))
    assert run(scheduler, 2) == [
        [("a", 0, 5), ("other", 0, 3)],
        [("a", 5, 6), ("b", 4, 5), ("c", 4, 5), ("other", 3, 4)],
    ]
    assert copies == [(0, 1, 4), (0, 2, 4)]


def test_few_lacking_tokens_are_computed_although_another_slot_has_them():
    copies = list[tuple[int, int, int]]()
    scheduler = Scheduler(2, 100, lambda *each: copies.append(each), least_shared=4)
    scheduler.submit(request("a", [1, 2, 3, 1], limit=9))
    run(scheduler, 1)
    scheduler.submit(request("b", [1, 2, 3], limit=9))
    assert run(scheduler) == [[("a", 4, 5), ("b", 0, 3)]]
    assert not copies


def test_a_prompt_that_several_passes_compute_is_waited_for_and_one_that_shares_little_is_not():
    scheduler = Scheduler(3, 4, no_copy)
    for session in ("a", "b"):
        scheduler.submit(request(session, [1, 2, 3, 1, 2, 3], limit=9))
    assert run(scheduler, 3) == [[("a", 0, 4)], [("a", 4, 6)], [("a", 6, 7), ("b", 5, 6)]]
    scheduler = Scheduler(3, 100, no_copy)
    scheduler.submit(request("a", [1, 2, 3, 3, 3, 3], limit=9))
    scheduler.submit(request("b", [1, 2, 1, 1, 1, 1], limit=9))
    assert run(scheduler) == [[("a", 0, 6), ("b", 0, 6)]]


def test_a_sequence_that_decodes_on_the_device_gets_no_chunk_until_its_request_ends_and_shares_its_tokens():
    copies = list[tuple[int, int, int]]()
    scheduler = Scheduler(2, 100, lambda *each: copies.append(each))
    scheduler.submit(request("a", [1, 2, 3], limit=2))
    ((slot, chunk),) = scheduler.plan()
    slot.cached, slot.is_decoding = chunk.end, True
    scheduler.append(slot, [1], [-1.0], 0)
    assert scheduler.plan() == []
    scheduler.submit(request("b", [1, 2, 3, 2], limit=1))
    assert run(scheduler) == [[("b", 3, 4)]]
    assert copies == [(0, 1, 3)]
    slot.cached = 4
    scheduler.append(slot, [2], [-1.0], 0)
    assert not slot.is_decoding
    scheduler.submit(request("a", [1, 2, 3, 1, 2, 3], limit=2))
    assert run(scheduler) == [[("a", 4, 6)]]


@given(st.lists(st.integers(1, 2), max_size=12), st.lists(st.integers(1, 2), max_size=12), st.integers(0, 12))
def test_the_common_prefix_is_as_long_as_the_tokens_are_equal(first, second, limit):
    limit = min(limit, len(first), len(second))
    expected = 0
    while expected < limit and first[expected] == second[expected]:
        expected += 1
    assert _common_prefix(first, second, limit) == expected


def test_a_long_prompt_comes_in_chunks_while_others_decode():
    scheduler = Scheduler(2, 4, no_copy)
    scheduler.submit(request("short", [1], limit=9))
    scheduler.submit(request("long", [1] * 10, limit=9))
    assert run(scheduler, 4) == [
        [("short", 0, 1), ("long", 0, 4)],
        [("short", 1, 2), ("long", 4, 8)],
        [("short", 2, 3), ("long", 8, 10)],
        [("short", 3, 4), ("long", 10, 11)],
    ]
