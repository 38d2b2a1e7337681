"""The link of a client against a replay without sockets, on a clock that moves only when the link waits."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, cast

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import RefusedError, StoppedError, UnavailableError, WireError
from asyncrl.replay.client import link as replay_link
from asyncrl.replay.client.link import BUSY_S, CREDITS, RETRY_S, ReplayLink, Request
from asyncrl.replay.messages import BUSY, OK, REFUSED, TEXT, Answer, Reply, decode_request, encode_reason, encode_reply
from asyncrl.replay.protocol import Configure, FailEpisode
from asyncrl.wire import Buffer

FULL = "the store cannot commit: No space left on device"
MANY = (1, 2, CREDITS, 3 * CREDITS)
POLL_S = replay_link.POLL_MS / 1000


class Connection:
    """A stand-in for the link's connected socket, and for the socket that reports its breaks."""

    def __init__(self, replay: FakeReplay) -> None:
        self._replay = replay
        self.inbox: deque[list[Buffer]] = deque()
        self.breaks = 0
        self.closed = False

    def send_multipart(self, frames: list[Buffer], flags: int, copy: bool) -> None:
        self._replay.arrived(self, frames)

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[zmq.Frame]:
        if not self.inbox:
            raise zmq.Again
        return [zmq.Frame(bytes(each)) for each in self.inbox.popleft()]

    def poll(self, milliseconds: int) -> bool:
        self._replay.now += milliseconds / 1000
        self._replay.idle(self)
        return bool(self.inbox)

    def get_monitor_socket(self, events: int) -> Monitor:
        return Monitor(self)

    def disable_monitor(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Monitor:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.closed = False

    def poll(self, milliseconds: int) -> bool:
        return self._connection.breaks > 0

    def recv_multipart(self) -> None:
        self._connection.breaks -= 1

    def close(self, linger: int) -> None:
        self.closed = True


class FakeReplay:
    """Applies FailEpisode once for each ticket, and answers with the ticket. `fate` says what becomes of a message:
    the kind of its answer, or empty where it gets none. It is also the `stop` of the link, whose waits it counts."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []
        self.applied: Counter[str] = Counter()
        self.numbers: list[int] = []
        self.under_way: set[int] = set()
        self.fate: Callable[[str], str] = lambda ticket: OK
        self.idle: Callable[[Connection], None] = lambda connection: None
        self.stop = cast("threading.Event", self)
        self.is_stopped = False

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return self.is_stopped

    def is_set(self) -> bool:
        return self.is_stopped

    def connected(self, *_: Any) -> Connection:
        self.under_way.clear()
        return Connection(self)

    def arrived(self, connection: Connection, frames: list[Buffer]) -> None:
        call = decode_request(frames)
        assert isinstance(call.request, FailEpisode)
        self.numbers.append(call.sequence)
        ticket, fate = call.request.ticket, self.fate(call.request.ticket)
        self.applied[ticket] += fate == OK
        if fate:
            self.answer(connection, fate, call.sequence, ticket)
        else:
            self.under_way.add(call.sequence)

    @staticmethod
    def answer(connection: Connection, kind: str, number: int, text: str) -> None:
        connection.inbox.append(
            encode_reply(OK, number, Reply(text)) if kind == OK else encode_reason(kind, number, FULL)
        )


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeReplay]:
    replay = FakeReplay()
    monkeypatch.setattr(replay_link, "connect", replay.connected)
    yield replay
    assert len(replay.numbers) == len(set(replay.numbers)), "no two messages have one number"


def link(replay: FakeReplay, **options: Any) -> ReplayLink:
    return ReplayLink("tcp://replay", "a", replay.stop, clock=lambda: replay.now, **options)


def tickets(count: int) -> list[str]:
    return [f"t{index}" for index in range(count)]


def requests(names: list[str]) -> list[Request]:
    return [(FailEpisode(name, "broken"), ()) for name in names]


def texts(answers: list[Answer]) -> list[str]:
    return [answer.read(TEXT) for answer in answers]


@pytest.mark.parametrize("count", MANY)
def test_an_outage_holds_a_client_up_for_its_length_and_one_wait_whatever_the_number_of_requests(
    replay: FakeReplay, count: int
) -> None:
    room_s = 19.5
    replay.fate = lambda ticket: BUSY if replay.now < room_s else OK
    names = tickets(count)
    assert texts(link(replay).answers(requests(names))) == names
    assert replay.waits == [BUSY_S] * 20
    assert room_s <= replay.now <= room_s + BUSY_S < room_s + 3
    assert set(replay.applied.values()) == {1}
    assert len(replay.numbers) <= count + 20 * CREDITS, "each round of an outage sends what may be under way at once"


@pytest.mark.parametrize("count", MANY)
def test_answers_that_came_with_a_busy_one_are_kept_and_only_the_others_are_sent_again(
    replay: FakeReplay, count: int
) -> None:
    names = tickets(count)
    put_off = set(names[::3])

    def fate(ticket: str) -> str:
        is_first = ticket in put_off
        put_off.discard(ticket)
        return BUSY if is_first else OK

    replay.fate = fate
    assert texts(link(replay).answers(requests(names))) == names
    assert replay.applied == Counter(names)
    assert len(replay.numbers) == count + len(names[::3])


def test_nothing_is_under_way_during_a_wait_for_a_busy_replay(replay: FakeReplay) -> None:
    names = tickets(8)
    replay.fate = lambda ticket: BUSY if ticket == "t0" and not replay.waits else "" if not replay.waits else OK

    def answer(connection: Connection) -> None:
        assert not replay.waits
        for number in replay.under_way:
            replay.answer(connection, OK, number, names[number - 1])

    replay.idle = answer
    assert texts(link(replay).answers(requests(names))) == names
    assert replay.waits == [BUSY_S]
    assert len(replay.numbers) == 8 + 1, "only the one that was put off is sent again"


def test_a_request_that_the_replay_cannot_take_does_not_hold_up_those_that_it_can(replay: FakeReplay) -> None:
    names = tickets(5)
    replay.fate = lambda ticket: BUSY if ticket == "t0" and len(replay.applied - Counter(t0=1)) < 4 else OK
    assert texts(link(replay).answers(requests(names), credits=1)) == names
    assert replay.waits == [BUSY_S]


def test_a_stop_ends_the_wait_for_a_busy_replay(replay: FakeReplay) -> None:
    def fate(ticket: str) -> str:
        replay.is_stopped = len(replay.waits) == 3
        return BUSY

    replay.fate = fate
    with pytest.raises(StoppedError):
        link(replay).answers(requests(tickets(4)))
    assert len(replay.waits) == 3


def test_a_client_that_gives_up_on_a_busy_replay_says_why_it_was_put_off(replay: FakeReplay) -> None:
    replay.fate = lambda ticket: BUSY
    with pytest.raises(UnavailableError, match=f"within 5 s; its last reply was: {FULL}"):
        link(replay, give_up_s=5.0).answers(requests(tickets(32)))
    assert len(replay.waits) <= 6


def test_answers_to_a_call_that_was_stopped_are_not_taken_for_those_of_the_next(replay: FakeReplay) -> None:
    client, replay.fate = link(replay), lambda ticket: ""
    old = tickets(4)

    def stop(connection: Connection) -> None:
        replay.is_stopped = True

    replay.idle = stop
    with pytest.raises(StoppedError):
        client.answers(requests(old))
    replay.is_stopped, late = False, sorted(replay.under_way)

    def answer(connection: Connection) -> None:
        for number in late:
            replay.answer(connection, OK, number, "an answer to an earlier request")
        for number, name in zip(sorted(replay.under_way - set(late)), ["n0", "n1", "n2", "n3"], strict=False):
            replay.answer(connection, OK, number, name)

    replay.idle = answer
    assert texts(client.answers(requests(["n0", "n1", "n2", "n3"]))) == ["n0", "n1", "n2", "n3"]


def test_refusals_that_name_no_request_do_not_reach_the_next_call(replay: FakeReplay) -> None:
    client = link(replay)
    connections: set[Connection] = set()

    def refuse(connection: Connection) -> None:
        connections.add(connection)
        for _ in replay.under_way:
            replay.answer(connection, REFUSED, 0, "")

    replay.fate, replay.idle = lambda ticket: "", refuse
    with pytest.raises(RefusedError, match="the replay refused"):
        client.answers(requests(tickets(3)))
    assert [each.closed for each in connections] == [True]
    replay.fate = lambda ticket: OK
    assert texts(client.answers(requests(["next"]))) == ["next"]


def test_nothing_is_sent_if_one_request_has_no_encoding(replay: FakeReplay) -> None:
    with pytest.raises(WireError):
        link(replay).answers([*requests(tickets(2)), (Configure({"a": object()}, 0, 0), ())])
    assert replay.numbers == []


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(chance=st.randoms(use_true_random=False), count=st.integers(1, 70), credits=st.integers(1, CREDITS))
def test_every_request_gets_its_own_answer_whatever_is_lost_late_doubled_or_put_off(
    chance: Random, count: int, credits: int
) -> None:
    replay, names = FakeReplay(), tickets(count)
    late: list[tuple[Connection, int, str]] = []
    troubles = iter(range(200))

    def fate(ticket: str) -> str:
        if next(troubles, None) is None:
            return OK
        return chance.choice([OK, OK, OK, BUSY, "lost", "late", "doubled"])

    def arrived(connection: Connection, frames: list[Buffer]) -> None:
        call = decode_request(frames)
        assert isinstance(call.request, FailEpisode)
        replay.numbers.append(call.sequence)
        ticket, found = call.request.ticket, fate(call.request.ticket)
        if found in (OK, BUSY):
            replay.applied[ticket] += found == OK
            replay.answer(connection, found, call.sequence, ticket)
        elif found == "late":
            late.append((connection, call.sequence, ticket))
        elif found == "doubled":
            replay.applied[ticket] += 1
            replay.answer(connection, BUSY, call.sequence, ticket)
            late.append((connection, call.sequence, ticket))

    def idle(connection: Connection) -> None:
        if late and chance.random() < 0.8:
            asked_over, number, ticket = late.pop(chance.randrange(len(late)))
            replay.applied[ticket] += 1
            replay.answer(asked_over, OK, number, ticket)
        elif next(troubles, None) is not None and chance.random() < 0.3:
            connection.breaks += 1

    replay.arrived, replay.idle = arrived, idle  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_link, "connect", replay.connected)
        client = link(replay)
        for call in range(2):
            mine = [f"{call}-{name}" for name in names]
            assert texts(client.answers(requests(mine), credits)) == mine
            assert all(replay.applied[name] for name in mine)
    assert len(replay.numbers) == len(set(replay.numbers))


def test_a_lost_message_is_sent_again_after_one_wait_for_its_answer(replay: FakeReplay) -> None:
    lost = set(tickets(16))

    def fate(ticket: str) -> str:
        if ticket in lost:
            lost.discard(ticket)
            return ""
        return OK

    replay.fate = fate
    assert texts(link(replay).answers(requests(tickets(16)))) == tickets(16)
    assert replay.now <= RETRY_S + 2 * POLL_S
