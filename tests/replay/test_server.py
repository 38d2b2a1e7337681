"""The replay over real sockets: waiting, refusals, strangers, and a server that dies between two requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from asyncrl.errors import RefusedError, StoppedError, UnavailableError
from asyncrl.replay.admission import Admission
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.feed import Feed
from asyncrl.replay.protocol import REFUSED, GetTickets, PutTrajectory, decode_reply, encode_request
from asyncrl.replay.records import DeadLetter
from asyncrl.replay.server import ReplayServer
from asyncrl.replay.service import ReplayService
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.store import Store
from asyncrl.types import Labels, Lease, RunIdentity
from asyncrl.wire import PROTOCOL
from tests.helpers import GENEROUS_S, make_labels, make_task, make_trajectory, until
from tests.replay.support import make_settings

FOREVER_S = 1e6


class Running:
    """A replay in a thread, on a port of its own; `kill` ends it without a farewell."""

    def __init__(
        self,
        path: Path,
        context: zmq.Context[Any],
        port: int | None = None,
        settings: ReplaySettings | None = None,
        max_bytes: int = 1 << 28,
        clock: Callable[[], float] = time.monotonic,
        run: RunIdentity | None = None,
    ) -> None:
        self.store = Store(path, max_bytes, durable=False)
        self.stop = threading.Event()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.router_mandatory = True
        self.port = port or self.socket.bind_to_random_port("tcp://127.0.0.1")
        if port:
            until(self._bound)
        server = ReplayServer(
            self.socket, self.store, ReplayService(settings or make_settings(), 10.0, clock, run=run), clock
        )
        self.thread = threading.Thread(target=server.run, args=(self.stop,), daemon=True)
        self.thread.start()

    def _bound(self) -> bool:
        """A port that was served a moment ago may not be free at once."""
        try:
            self.socket.bind(self.endpoint)
        except zmq.ZMQError:
            return False
        return True

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.stop.set()
        self.thread.join()
        self.socket.close()
        self.store.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def replay(tmp_path: Path, context: zmq.Context[Any]) -> Iterator[Running]:
    running = Running(tmp_path, context)
    yield running
    if not running.stop.is_set():
        running.kill()


def client(replay: Running, context: zmq.Context[Any], worker: str = "a", **options: Any) -> ReplayClient:
    return ReplayClient(replay.endpoint, worker, "1", context=context, **options)


def test_a_whole_round_over_sockets_ends_in_the_same_arrays(replay: Running, context: zmq.Context[Any]) -> None:
    with_close = client(replay, context)
    sent = {}
    for ticket in with_close.tickets([], 4):
        sent[ticket.id] = make_trajectory(ticket)
        assert with_close.put(sent[ticket.id]) == "stored"
    leases = with_close.lease(["rules"], 100, 1 << 20)
    with_close.label([make_labels(lease.trajectory.id, 0.5) for lease in leases])
    plan = with_close.plan(0)
    assert plan is not None
    for trajectory in with_close.fetch(plan.ids):
        assert trajectory.tokens.tobytes() == sent[trajectory.id].tokens.tobytes()
        assert trajectory.logprobs.tobytes() == sent[trajectory.id].logprobs.tobytes()
        assert trajectory.turns == sent[trajectory.id].turns
    assert [labels.reward for labels in with_close.labels(plan.ids)] == [0.5] * 4
    assert with_close.audit()["lost"] == 0
    with_close.close()


def test_a_request_with_nothing_to_give_waits_and_is_answered_when_there_is(
    replay: Running, context: zmq.Context[Any]
) -> None:
    waiting, working = client(replay, context, "s"), client(replay, context)
    results: list[Any] = []

    def lease() -> list[Lease]:
        return waiting.lease(["rules"], 10, 1000)

    thread = threading.Thread(target=lambda: results.extend(lease() or lease()))
    thread.start()
    ticket = working.tickets([], 1)[0]
    working.put(make_trajectory(ticket))
    thread.join(GENEROUS_S)
    assert [lease.trajectory.id for lease in results] == [ticket.id]
    waiting.close()
    working.close()


def test_a_replay_that_is_killed_between_two_requests_goes_on_where_it_was(
    tmp_path: Path, context: zmq.Context[Any]
) -> None:
    first = Running(tmp_path, context)
    worker = client(first, context, retry_s=FOREVER_S)
    tickets = worker.tickets([], 2)
    assert worker.put(make_trajectory(tickets[0])) == "stored"
    first.kill()
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.extend(worker.put(make_trajectory(each)) for each in tickets))
    thread.start()
    second = Running(tmp_path, context, first.port)
    thread.join(GENEROUS_S)
    assert results == ["duplicate", "stored"]
    assert worker.audit()["lost"] == 0
    worker.close()
    second.kill()


def test_a_request_under_way_at_a_replay_that_dies_is_sent_again_as_soon_as_the_connection_breaks(
    tmp_path: Path, context: zmq.Context[Any]
) -> None:
    silent = context.socket(zmq.ROUTER)
    silent.linger = 0
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    worker = ReplayClient(f"tcp://127.0.0.1:{port}", "a", "1", context=context, retry_s=FOREVER_S)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(worker.tickets([], 1)))
    thread.start()
    assert silent.poll(1000 * GENEROUS_S)
    silent.close()
    replay = Running(tmp_path, context, port)
    thread.join(GENEROUS_S)
    assert len(results) == 1
    worker.close()
    replay.kill()


def test_a_refusal_carries_the_reason_and_takes_no_effect(replay: Running, context: zmq.Context[Any]) -> None:
    learner = client(replay, context)
    with pytest.raises(RefusedError, match="next one is 0"):
        learner.plan(5)
    with pytest.raises(RefusedError, match="unknown"):
        learner.fetch(["nobody"])
    assert learner.status()["refused"] == 2
    learner.close()


def test_strangers_are_refused_with_a_reason_and_harm_nobody(replay: Running, context: zmq.Context[Any]) -> None:
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(replay.endpoint)
    bad = [
        [b"noise"],
        [b""],
        [b"\x95" + b"\xc1" * 40, b"x" * 100],
        encode_request(PutTrajectory(), 7),
        encode_request(GetTickets("w" * 100_000, "1", [], [], 1), 8),
        encode_request(GetTickets("w", "1", [["w"]], [], 1), 9),  # type: ignore[list-item]
        [msgspec.msgpack.encode([PROTOCOL, "no such request", 10, {}, None])],
    ]
    for frames in bad:
        stranger.send_multipart(frames)
        assert stranger.poll(5000)
        reply = decode_reply(stranger.recv_multipart())
        assert reply.kind == REFUSED
        assert reply.reason
    honest = client(replay, context)
    assert honest.status()["refused"] == len(bad)
    assert len(honest.tickets([], 1)) == 1
    honest.close()
    stranger.close()


def test_a_failure_whose_reason_has_no_encoding_or_no_end_is_taken_as_any_other(
    replay: Running, context: zmq.Context[Any]
) -> None:
    actor = client(replay, context)
    first, second = actor.tickets([], 2)
    actor.fail(first.id, "half of a pair: \ud800")
    actor.fail(second.id, "x" * 50_000_000)
    status = actor.status()
    assert (status["failures"], status["refused"]) == (2, 0)
    (reason,) = {letter.reason for letter in letters_of(replay) if "pair" in letter.reason}
    assert reason == "half of a pair: ?"
    assert max(len(letter.reason) for letter in letters_of(replay)) < 3000
    assert len(actor.tickets([], 2)) == 2
    actor.close()


def letters_of(replay: Running) -> list[DeadLetter]:
    with replay.store.transaction(write=False) as tx:
        return [letter for _, letter in DeadLetter.all(tx)]


def test_labels_of_a_scorer_with_any_name_are_taken(replay: Running, context: zmq.Context[Any]) -> None:
    one = client(replay, context)
    for ticket in one.tickets([], 2):
        one.put(make_trajectory(ticket))
    for lease in one.lease(["rules"], 2, 1 << 20):
        one.label([Labels(lease.trajectory.id, 1.0, 1.0, "scorer \udfff", extra={"rule/\ud800": 0.5})])
    assert one.status()["labelled"] == 2
    one.close()


def test_a_reply_that_cannot_be_encoded_fails_its_request_alone(tmp_path: Path, context: zmq.Context[Any]) -> None:
    endless = make_task(extra_info={"number": 2**70})
    running = Running(tmp_path, context, settings=make_settings(feed=Feed([endless], seed=0, shuffle=False)))
    actor = client(running, context)
    with pytest.raises(RefusedError, match="cannot be encoded"):
        actor.tickets([], 1)
    status = actor.status()
    assert status["refused"] == 1
    assert status["depth_tickets"] == 0, "what could not be told has not happened"
    actor.close()
    running.kill()


def test_a_reply_with_many_long_tasks_is_taken(tmp_path: Path, context: zmq.Context[Any]) -> None:
    long = make_task(messages=[{"role": "user", "content": "x" * (1 << 20)}])
    settings = make_settings(admission=Admission(1, 8), feed=Feed([long], seed=0, shuffle=False))
    running = Running(tmp_path, context, settings=settings)
    actor = client(running, context)
    assert len(actor.tickets([], 8)) == 8
    actor.close()
    running.kill()


def test_a_wait_for_an_absent_replay_ends_on_stop_or_when_told_to_give_up(context: zmq.Context[Any]) -> None:
    stop = threading.Event()
    stop.set()
    waiting = ReplayClient("tcp://127.0.0.1:9", "a", "1", stop=stop, context=context)
    with pytest.raises(StoppedError):
        waiting.status()
    waiting.close()
    impatient = ReplayClient("tcp://127.0.0.1:9", "a", "1", give_up_s=0.1, context=context)
    with pytest.raises(UnavailableError, match="no answer from the replay"):
        impatient.status()
    impatient.close()
