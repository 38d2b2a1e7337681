"""Turns of the server, one at a time: what shares a transaction, and what waiting requests cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import lmdb
import pytest
import zmq

from asyncrl.replay.admission import Admission
from asyncrl.replay.rules import Rules
from asyncrl.replay.server import PATIENCE_S, Server
from asyncrl.replay.service import Service
from asyncrl.replay.store import Store, Transaction
from asyncrl.wire import Message, decode, encode, read_ticket, trajectory_message
from tests.helpers import make_trajectory
from tests.replay.support import make_rules


class CountingService(Service):
    """Counts the requests that it handles, by kind; those of kind `raise` fail after a write, for the reason given."""

    def __init__(self, rules: Rules, clock: Callable[[], float]) -> None:
        super().__init__(rules, 10.0, clock)
        self.asked: Counter[str] = Counter()

    def handle(self, tx: Transaction, request: Message) -> Message | None:
        self.asked[request.kind] += 1
        if request.kind == "raise":
            tx.add("spoiled")
            raise lmdb.MapFullError("full")
        return super().handle(tx, request)


class Turns:
    """A server and its clients, without sockets: `ask` is one turn with requests by client; replies by client."""

    def __init__(self, path: Path, **rules: Any) -> None:
        self.now, self._requests = 0.0, list[list[zmq.Frame]]()
        self.store = Store(path, 1 << 28, durable=False)
        self.service = CountingService(make_rules(**rules), lambda: self.now)
        socket = cast("zmq.Socket[bytes]", self)
        self._server = Server(socket, self.store, self.service, lambda: self.now)

    def ask(self, *requests: tuple[str, Message]) -> dict[str, Message]:
        self.replies: dict[str, Message] = {}
        self._requests = [
            [zmq.Frame(client.encode()), *map(zmq.Frame, encode(message))] for client, message in requests
        ]
        while True:
            self._server.turn()
            if not self._requests:
                return self.replies

    def recv_multipart(self, flags: int, copy: bool) -> list[zmq.Frame]:
        if not self._requests:
            raise zmq.Again
        return self._requests.pop(0)

    def send_multipart(self, frames: list[bytes], flags: int, copy: bool) -> None:
        self.replies[frames[0].decode()] = decode([bytes(frame) for frame in frames[1:]])

    def counter(self, name: str) -> int:
        with self.store.transaction(write=False) as tx:
            return tx.counter(name)


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[Turns]:
    turns = Turns(tmp_path)
    yield turns
    turns.store.close()


def tickets(worker: str, want: int = 1, holding: Any = ()) -> Message:
    return Message(
        "tickets", 1, {"worker": worker, "incarnation": "1", "holding": holding, "waiting": [], "want": want}
    )


def test_what_is_refused_after_a_write_is_undone_alone(turns: Turns) -> None:
    given = [read_ticket(body) for body in turns.ask(("a", tickets("a", 2)))["a"].body["tickets"]]
    first, second = (trajectory_message(make_trajectory(ticket)) for ticket in given)
    replies = turns.ask(("a", first), ("b", Message("raise")), ("c", tickets("c", 1, [["no id"]])), ("d", second))
    assert [replies[name].kind for name in "abcd"] == ["ok", "busy", "refused", "ok"]
    assert [replies[name].body["result"] for name in "ad"] == ["stored", "stored"]
    assert (turns.counter("accepted"), turns.counter("refused"), turns.counter("spoiled")) == (2, 1, 0)
    with turns.store.transaction(write=False) as tx:
        assert list(tx.keys("actors")) == [b"a"]


def test_a_thousand_who_wait_for_tickets_cost_one_attempt_a_turn(tmp_path: Path) -> None:
    turns = Turns(tmp_path, admission=Admission(0, 4))
    turns.ask(("first", tickets("first", 4)))
    turns.ask(*((f"a{i}", tickets(f"a{i}")) for i in range(1000)))
    turns.service.asked.clear()
    assert turns.ask(("p", Message("status"))).keys() == {"p"}
    assert turns.service.asked == {"status": 1, "tickets": 1}
    answered = turns.ask(("l", Message("published", 1, {"version": 1})))
    assert answered.keys() == {"l", "a0", "a1", "a2", "a3"}
    turns.now += PATIENCE_S
    assert Counter(reply.kind for reply in turns.ask().values()) == {"nothing": 996}
    turns.service.asked.clear()
    turns.ask(("p", Message("status")))
    assert turns.service.asked == {"status": 1}
    turns.store.close()


def test_scorers_of_different_kinds_do_not_wait_for_each_other(turns: Turns) -> None:
    def lease(worker: str, kind: str) -> Message:
        body = {"worker": worker, "incarnation": "1", "serves": [kind], "trajectories": 1, "tokens": 100}
        return Message("lease", 1, body)

    assert not turns.ask(("p", lease("p", "prm")), ("q", lease("q", "prm")), ("r", lease("r", "rules")))
    ticket = read_ticket(turns.ask(("a", tickets("a")))["a"].body["tickets"][0])
    turns.service.asked.clear()
    replies = turns.ask(("a", trajectory_message(make_trajectory(ticket))))
    assert {name: reply.kind for name, reply in replies.items()} == {"a": "ok", "r": "ok"}
    assert turns.service.asked["lease"] == 2
