"""Commits of the server, one at a time: what shares a transaction, and what waiting requests cost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import lmdb
import pytest
import zmq

from asyncrl.errors import BusyError, ConfigError, RefusedError
from asyncrl.machine.activity import Activity
from asyncrl.replay.committer import PATIENCE_S, TICK_S, Committer
from asyncrl.replay.failures.failure_limit import FEWEST, SINGLE_GROUP_S
from asyncrl.replay.messages import (
    BUSY,
    ENDED,
    NOTHING,
    OK,
    OVER,
    REFUSED,
    TEXT,
    TICKETS,
    VALUES,
    Answer,
    Call,
    Reply,
    decode_reply,
    encode_request,
)
from asyncrl.replay.protocol import (
    Discard,
    FailEpisode,
    Fetch,
    Finished,
    GetClock,
    GetPlan,
    GetStatus,
    GetTickets,
    LeaseTrajectories,
    Published,
    PutLabels,
    PutTrajectory,
)
from asyncrl.replay.server import BATCH, COMPANY_S, ReplayServer
from asyncrl.replay.service import PUT_OFF_S, ReplayService
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.ending import LATEST_S
from asyncrl.replay.store.store import Store
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import RunIdentity, Ticket
from asyncrl.wire import Buffer, encode, labels_message, trajectory_message
from tests.helpers import make_labels, make_trajectory
from tests.replay.support import make_settings

LEASE_S = 10.0


class CountingService(ReplayService):
    """Counts the requests that it handles, by kind. Requests to discard fail after a write with `fails`,
    and the tick numbered `failing_tick` fails."""

    def __init__(self, settings: ReplaySettings, clock: Callable[[], float]) -> None:
        super().__init__(settings, LEASE_S, clock, ends=True)
        self.asked: Counter[str] = Counter()
        self.fails: Exception = lmdb.MapFullError("full")
        self.failing_tick = 0

    def handle(self, tx: Transaction, call: Call) -> Reply | None:
        self.asked[call.kind] += 1
        if call.kind == "Discard":
            tx.add("spoiled")
            raise self.fails
        return super().handle(tx, call)

    def tick(self, tx: Transaction) -> None:
        tx.add("ticks")
        super().tick(tx)
        if tx.counter("ticks") == self.failing_tick:
            raise KeyError("bug")


class Turns:
    """A server and its clients, without sockets: `ask` is one turn with requests by client; replies by client."""

    def __init__(self, path: Path, **rules: Any) -> None:
        self.now, self._requests = 0.0, list[list[zmq.Frame]]()
        self.polls: list[int] = []
        self.store = Store(path, 1 << 28, durable=False)
        self.service = CountingService(make_settings(**rules), lambda: self.now)
        socket = cast("zmq.Socket[bytes]", self)
        self._server = ReplayServer(socket, self.store, self.service, lambda: self.now)

    def ask(self, *requests: tuple[str, list[Buffer]]) -> dict[str, Answer]:
        self.replies: dict[str, Answer] = {}
        self._requests = [[zmq.Frame(client.encode()), *map(zmq.Frame, frames)] for client, frames in requests]
        while True:
            self._server.serve_once()
            if not self._requests:
                return self.replies

    def run(self, *requests: tuple[str, list[Buffer]], rounds: int = 9) -> dict[str, Answer]:
        """The replies to requests where the server runs for so many rounds. One request arrives in each of the first
        ones, when three quarters of the time have passed that it waits for."""
        stop = threading.Event()
        self.replies, arriving = {}, list(requests)

        def poll(timeout: int) -> int:
            self.polls.append(timeout)
            self._requests = [[zmq.Frame(client.encode()), *map(zmq.Frame, frames)] for client, frames in arriving[:1]]
            del arriving[:1]
            self.now += timeout / 1000 * (0.75 if self._requests else 1)
            if len(self.polls) == rounds:
                stop.set()
            return len(self._requests)

        self.poll = poll
        self._server.run(stop)
        return self.replies

    def recv_multipart(self, flags: int, copy: bool) -> list[zmq.Frame]:
        if not self._requests:
            raise zmq.Again
        return self._requests.pop(0)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        self.replies[frames[0].decode()] = decode_reply([bytes(frame) for frame in frames[1:]])

    def counter(self, name: str) -> int:
        with self.store.transaction(write=False) as tx:
            return tx.counter(name)


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[Turns]:
    turns = Turns(tmp_path)
    yield turns
    turns.store.close()


STATUS = encode_request(GetStatus(), 1)


def tickets(worker: str, want: int = 1, holding: Any = ()) -> list[Buffer]:
    return encode_request(GetTickets(worker, "1", holding, [], want), 1)


def trajectory(ticket: Ticket) -> list[Buffer]:
    return encode_request(PutTrajectory(0), 1, frames=encode(trajectory_message(make_trajectory(ticket))))


def test_a_replay_whose_store_is_full_at_its_start_says_that_the_store_must_be_larger(tmp_path: Path) -> None:
    # The start writes the name of the run.
    run = RunIdentity("r" * (1 << 18), "1")
    with closing(Store(tmp_path, 1 << 18, durable=False)) as store:
        service = ReplayService(make_settings(), LEASE_S, lambda: 0.0, run=run)
        with pytest.raises(ConfigError, match=rf"the store {tmp_path} is full: .* a larger replay\.max_store_gb"):
            Committer(store, service, lambda: 0.0).start()
    with closing(Store(tmp_path, 1 << 20, durable=False)) as store:
        Committer(store, service, lambda: 0.0).start()


@pytest.mark.parametrize("error", [lmdb.MapFullError("full"), BusyError("later"), RefusedError("no"), KeyError("bug")])
def test_what_fails_after_a_write_is_undone_alone(
    turns: Turns, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    turns.service.fails = error
    first, second = turns.ask(("a", tickets("a", 2)))["a"].read(TICKETS)
    failing, malformed = encode_request(Discard("x"), 1), tickets("c", 1, [["no id"]])
    replies = turns.ask(("a", trajectory(first)), ("b", failing), ("c", malformed), ("d", trajectory(second)))
    busy, bug = isinstance(error, (lmdb.Error, BusyError)), isinstance(error, KeyError)
    assert [replies[name].kind for name in "abcd"] == [OK, BUSY if busy else REFUSED, REFUSED, OK]
    assert [replies[name].read(TEXT) for name in "ad"] == ["stored", "stored"]
    assert (turns.counter("accepted"), turns.counter("spoiled")) == (2, 0)
    assert (turns.counter("refused"), turns.counter("internal_errors")) == (1 + (not busy and not bug), bug)
    assert ("internal error" in replies["b"].reason) == ("Traceback" in caplog.text) == bug
    with turns.store.transaction(write=False) as tx:
        assert list(tx.keys("actors")) == [b"a"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (lmdb.DiskError("mdb_txn_commit"), "{} cannot commit: there is no room on its disk"),
        (lmdb.Error("mdb_txn_commit: File too large"), "{} cannot commit: mdb_txn_commit: File too large"),
    ],
)
def test_while_nothing_can_be_stored_every_requester_is_put_off_once_and_the_status_says_why(
    turns: Turns, error: lmdb.Error, reason: str
) -> None:
    with turns.store.transaction() as tx:
        turns.service.start(tx)
    ticket = turns.ask(("a", tickets("a")))["a"].read(TICKETS)[0]
    leases = encode_request(LeaseTrajectories("s", "1", ["rules"], 1, 1000, 1), 7)
    assert turns.ask(("waits", leases)) == {}
    turns.service.fails = error
    failing = ("b", encode_request(Discard("x"), 1))
    replies = turns.ask(("a", trajectory(ticket)), failing, ("joins", leases), ("c", STATUS))
    said = f"the store {reason.format(turns.store.path)}"
    assert [replies[name].kind for name in ("a", "b", "waits", "joins", "c")] == [BUSY, BUSY, BUSY, BUSY, OK]
    assert [replies[name].sequence for name in ("waits", "joins")] == [7, 7]
    assert all(replies[name].reason.startswith(said) for name in ("a", "b", "waits", "joins"))
    assert replies["c"].read(VALUES)["busy"].startswith(said)
    turns.now += PATIENCE_S
    assert turns.ask(("c", STATUS)).keys() == {"c"}, "who was put off gets no second answer"
    turns.now += PUT_OFF_S
    assert turns.ask(("c", STATUS))["c"].read(VALUES)["busy"] == ""


def test_a_complete_group_that_is_too_old_ends_no_replay_that_cannot_store(turns: Turns) -> None:
    with turns.store.transaction() as tx:
        turns.service.start(tx)
    issued = turns.ask(("a", tickets("a", 2)))["a"].read(TICKETS)
    turns.ask(*((ticket.id, trajectory(ticket)) for ticket in issued))
    turns.ask(("learner", encode_request(Published(2), 1)))
    turns.ask(("s", encode_request(LeaseTrajectories("s", "1", ["rules"], 2, 1000, 1), 1)))
    for ticket in issued:
        frames = encode(labels_message(make_labels(ticket.id)))
        assert turns.ask(("s", encode_request(PutLabels("s", "1"), 1, frames=frames)))["s"].kind == OK
    turns.service.fails = lmdb.DiskError("mdb_txn_commit")
    assert turns.ask(("b", encode_request(Discard("x"), 1)))["b"].kind == BUSY
    assert turns.counter("evicted") == 0
    assert turns.ask(("learner", encode_request(Published(3), 1)))["learner"].kind == OK
    assert turns.counter("evicted") == 2


def test_the_status_says_that_requests_are_put_off_since_the_store_is_full(turns: Turns) -> None:
    turns.ask(("b", encode_request(Discard("x"), 1)))
    assert "replay.max_store_gb" in turns.ask(("c", STATUS))["c"].read(VALUES)["busy"]


def test_failures_in_a_turn_that_is_undone_and_made_again_count_once(turns: Turns) -> None:
    held = turns.ask(("a", tickets("a", FEWEST // 2)))["a"].read(TICKETS)
    failures = [(each.id, encode_request(FailEpisode(each.id, "broken"), 1)) for each in held]
    assert turns.ask(*failures, ("b", encode_request(Discard("x"), 1)))["b"].kind == BUSY
    assert turns.counter("failures") == FEWEST // 2
    turns.now += SINGLE_GROUP_S
    plan = ("learner", encode_request(GetPlan(0, ahead=False), 1))
    assert turns.ask(plan) == {}, "half as many failed as end a run"
    for _ in range(2):
        again = turns.ask(("a", tickets("a", FEWEST // 2)))["a"].read(TICKETS)
        turns.ask(*((each.id, encode_request(FailEpisode(each.id, "broken"), 1)) for each in again))
    turns.now += SINGLE_GROUP_S
    assert turns.ask(plan)["learner"].kind == ENDED


def test_a_tick_that_fails_is_undone_and_counted_and_the_next_one_is_made(
    turns: Turns, caplog: pytest.LogCaptureFixture
) -> None:
    (lost,) = turns.ask(("gone", tickets("gone")))["gone"].read(TICKETS)
    turns.service.failing_tick = 2
    for _ in range(3):
        turns.now += LEASE_S + TICK_S
        assert turns.ask(("a", STATUS))["a"].kind == OK
        turns.service.failing_tick *= turns.counter("internal_errors") == 0
    assert (turns.counter("ticks"), turns.counter("internal_errors")) == (3, 1)
    assert "Traceback" in caplog.text
    assert turns.ask(("b", tickets("b")))["b"].read(TICKETS) == [lost], "the lease that the failed tick ended"


def test_a_thousand_who_wait_for_tickets_cost_one_attempt_a_turn(tmp_path: Path) -> None:
    turns = Turns(tmp_path, admission=Admission(0, 4))
    turns.ask(("first", tickets("first", 4)))
    turns.ask(*((f"a{i}", tickets(f"a{i}")) for i in range(1000)))
    turns.service.asked.clear()
    assert turns.ask(("p", STATUS)).keys() == {"p"}
    assert turns.service.asked == {"GetStatus": 1, "GetTickets": 1}
    answered = turns.ask(("l", encode_request(Published(1), 1)))
    assert answered.keys() == {"l", "a0", "a1", "a2", "a3"}
    turns.now += PATIENCE_S
    assert Counter(reply.kind for reply in turns.ask().values()) == {NOTHING: 996}
    turns.service.asked.clear()
    turns.ask(("p", STATUS))
    assert turns.service.asked == {"GetStatus": 1}
    turns.store.close()


class EndlessSocket:
    """Has another request at any time, until `replies` were sent: then it sets `stop`."""

    def __init__(self, replies: int, stop: threading.Event) -> None:
        self._left, self._stop = replies, stop

    def poll(self, timeout: int) -> int:
        return 1

    def recv_multipart(self, flags: int, copy: bool) -> list[zmq.Frame]:
        return [zmq.Frame(b"p"), *map(zmq.Frame, STATUS)]

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        self._left -= 1
        if not self._left:
            self._stop.set()


def test_a_replay_that_is_never_idle_gives_a_sign_of_life_with_each_turn(tmp_path: Path) -> None:
    turns, stop, activity = 5, threading.Event(), Activity()
    store = Store(tmp_path, 1 << 28, durable=False)
    socket = cast("zmq.Socket[bytes]", EndlessSocket(turns * BATCH, stop))
    service = ReplayService(make_settings(), LEASE_S, lambda: 0.0)
    ReplayServer(socket, store, service, lambda: 0.0, activity=activity).run(stop)
    store.close()
    assert activity.advances >= turns


def test_fetches_without_end_hold_up_no_other_request(turns: Turns) -> None:
    fetch = encode_request(Fetch("data", []), 1)
    order = list(turns.ask(("a", STATUS), *((f"f{i}", fetch) for i in range(1000))))
    assert len(order) == 1001
    assert order.index("a") < 500


def test_scorers_of_different_kinds_do_not_wait_for_each_other(turns: Turns) -> None:
    def lease(worker: str, kind: str) -> list[Buffer]:
        return encode_request(LeaseTrajectories(worker, "1", [kind], 1, 100, 1), 1)

    assert not turns.ask(("p", lease("p", "prm")), ("q", lease("q", "prm")), ("r", lease("r", "rules")))
    (ticket,) = turns.ask(("a", tickets("a")))["a"].read(TICKETS)
    turns.service.asked.clear()
    replies = turns.ask(("a", trajectory(ticket)))
    assert {name: reply.kind for name, reply in replies.items()} == {"a": OK, "r": OK}
    assert turns.service.asked["LeaseTrajectories"] == 2


def test_a_renewal_without_company_waits_for_a_moment_and_for_no_tick(turns: Turns) -> None:
    (held,) = turns.ask(("a", tickets("a")))["a"].read(TICKETS)
    clock = ("b", encode_request(GetClock(), 1))
    replies = turns.run(("a", tickets("a", 0, [held.id])), clock, clock, rounds=4)
    assert replies.keys() == {"a", "b"}
    assert turns.counter("ticks") == 1
    assert sum(turns.polls[1:]) < 2 * COMPANY_S * 1000, "what is answered at once is no company"


def test_who_only_renews_a_lease_hears_of_the_end_of_the_run_before_the_replay_leaves(turns: Turns) -> None:
    turns.ask(("a", tickets("a")))
    turns.ask(("l", encode_request(Finished(), 1)))
    turns.now += LATEST_S - 0.1
    replies = turns.run(("b", encode_request(GetClock(), 1)), ("a", tickets("a", 0)), rounds=100)
    assert replies["a"].kind == OVER
    assert len(turns.polls) < 100


def test_renewals_begin_no_turn_and_go_with_the_next_request_or_tick(turns: Turns) -> None:
    (held,) = turns.ask(("a", tickets("a")))["a"].read(TICKETS)
    renewal = ("a", tickets("a", 0, [held.id]))
    assert turns.ask(renewal) == {}
    assert turns.ask(("b", STATUS)).keys() == {"a", "b"}
    assert turns.ask(renewal) == {}
    turns.now += TICK_S
    assert turns.ask().keys() == {"a"}
    assert len(turns.ask(*(renewal for _ in range(BATCH)))) == 1, "they would hold up all that come behind them"


def test_a_worker_whose_request_was_not_stored_is_not_remembered(turns: Turns) -> None:
    """The store could not commit: memory must have the leases that the store has, and no others."""
    with turns.store.transaction() as tx:
        turns.service.start(tx)
    turns.service.fails = lmdb.Error("no space left on device")
    replies = turns.ask(("a", tickets("a", 1)), ("b", encode_request(Discard("x"), 1)))
    assert {name: reply.kind for name, reply in replies.items()} == {"a": BUSY, "b": BUSY}
    with turns.store.transaction(write=False) as tx:
        assert turns.service.report(tx)["actors"] == 0
