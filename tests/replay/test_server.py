"""The replay over real sockets: waiting, refusals, strangers, and a server that dies between two requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from asyncrl.errors import RefusedError, StoppedError, UnavailableError, WireError
from asyncrl.network.listener import Listener
from asyncrl.replay.client import link as replay_link
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.messages import REFUSED, decode_reply, encode_request
from asyncrl.replay.protocol import GetTickets, PutTrajectory
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.replay.store.records import DeadLetter
from asyncrl.types import Labels
from asyncrl.wire import MAX_HEADER_BYTES, PROTOCOL
from tests.helpers import GENEROUS_S, TOO_LARGE, make_labels, make_task, make_trajectory
from tests.replay.support import ReplayThread, make_settings

pytestmark = pytest.mark.slow

FOREVER_S = 1e6


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[ReplayThread]:
    with ReplayThread(tmp_path) as running:
        yield running


def test_a_whole_round_over_sockets_ends_in_the_same_arrays(replay: ReplayThread) -> None:
    one = replay.client()
    sent = {}
    for ticket in one.tickets([], 4):
        sent[ticket.id] = make_trajectory(ticket)
        assert one.put(sent[ticket.id]) == "stored"
    leases = one.lease(["rules"], 100, 1 << 20)
    one.label([make_labels(lease.trajectory.id, 0.5) for lease in leases])
    plan = one.plan(0)
    assert plan is not None
    for trajectory in one.fetch(plan.ids):
        assert trajectory.tokens.tobytes() == sent[trajectory.id].tokens.tobytes()
        assert trajectory.logprobs.tobytes() == sent[trajectory.id].logprobs.tobytes()
        assert trajectory.turns == sent[trajectory.id].turns
    assert [labels.reward for labels in one.labels(plan.ids)] == [0.5] * 4
    assert one.audit()["lost"] == 0


def test_a_request_with_nothing_to_give_waits_and_is_answered_when_there_is(replay: ReplayThread) -> None:
    waiting, working = replay.client("s"), replay.client()
    results: list[Any] = []

    def lease() -> None:
        # One request waits for about a second only.
        while not results:
            results.extend(waiting.lease(["rules"], 10, 1000))

    thread = threading.Thread(target=lease)
    thread.start()
    ticket = working.tickets([], 1)[0]
    working.put(make_trajectory(ticket))
    thread.join(GENEROUS_S)
    assert [lease.trajectory.id for lease in results] == [ticket.id]


def test_a_replay_that_is_killed_between_two_requests_goes_on_where_it_was(replay: ReplayThread) -> None:
    worker = replay.client(retry_s=FOREVER_S)
    tickets = worker.tickets([], 2)
    assert worker.put(make_trajectory(tickets[0])) == "stored"
    replay.kill()
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.extend(worker.put(make_trajectory(each)) for each in tickets))
    thread.start()
    replay.start()
    thread.join(GENEROUS_S)
    assert results == ["duplicate", "stored"]
    assert worker.audit()["lost"] == 0


def test_a_request_under_way_at_a_replay_that_dies_is_sent_again_as_soon_as_the_connection_breaks(
    tmp_path: Path, context: zmq.Context[Any]
) -> None:
    silent = Listener(context, "tcp://127.0.0.1:*", None, 1 << 20)
    replay = ReplayThread(tmp_path, endpoint=silent.endpoint)
    worker = replay.client(retry_s=FOREVER_S)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(worker.tickets([], 1)))
    thread.start()
    assert silent.socket.poll(1000 * GENEROUS_S)
    silent.close()
    with replay:
        thread.join(GENEROUS_S)
        assert len(results) == 1


def test_a_refusal_carries_the_reason_and_takes_no_effect(replay: ReplayThread) -> None:
    learner = replay.client()
    with pytest.raises(RefusedError, match="next step is 0"):
        learner.plan(5)
    with pytest.raises(RefusedError, match="unknown"):
        learner.fetch(["nobody"])
    assert learner.status()["refused"] == 2


def test_strangers_are_refused_with_a_reason_and_harm_nobody(replay: ReplayThread) -> None:
    stranger = replay.peer()
    bad = [
        [b"noise"],
        [b""],
        [b"\x95" + b"\xc1" * 40, b"x" * 100],
        encode_request(PutTrajectory(0), 7),
        encode_request(GetTickets("w" * 100_000, "1", [], [], 1), 8),
        encode_request(GetTickets("w", "1", [["w"]], [], 1), 9),  # type: ignore[list-item]
        [msgspec.msgpack.encode([PROTOCOL, "no such request", 10, {}, None])],
    ]
    for frames in bad:
        stranger.send_multipart(frames)
        assert stranger.poll(1000 * GENEROUS_S)
        reply = decode_reply(stranger.recv_multipart())
        assert reply.kind == REFUSED
        assert reply.reason
    honest = replay.client()
    assert honest.status()["refused"] == len(bad)
    assert len(honest.tickets([], 1)) == 1


def test_a_failure_whose_reason_has_no_encoding_or_no_end_is_taken_as_any_other(replay: ReplayThread) -> None:
    actor = replay.client()
    first, second = actor.tickets([], 2)
    actor.fail(first.id, "half of a pair: \ud800")
    actor.fail(second.id, "x" * 50_000_000)
    status = actor.status()
    assert (status["failures"], status["refused"]) == (2, 0)
    (reason,) = {dead.reason for dead in letters_of(replay) if "pair" in dead.reason}
    assert reason == "half of a pair: ?"
    assert max(len(dead.reason) for dead in letters_of(replay)) < 3000
    assert len(actor.tickets([], 2)) == 2


def letters_of(replay: ReplayThread) -> list[DeadLetter]:
    with replay.store.transaction(write=False) as tx:
        return [dead for _, dead in DeadLetter.all(tx)]


def test_labels_of_a_scorer_with_any_name_are_taken(replay: ReplayThread) -> None:
    one = replay.client()
    for ticket in one.tickets([], 2):
        one.put(make_trajectory(ticket))
    for lease in one.lease(["rules"], 2, 1 << 20):
        assert not any(one.label([Labels(lease.trajectory.id, 1.0, 1.0, "scorer \udfff", extra={"rule/\ud800": 0.5})]))
    assert one.status()["labelled"] == 2


def test_labels_that_are_refused_or_cannot_be_encoded_do_not_keep_others_from_being_taken_once(
    replay: ReplayThread,
) -> None:
    one = replay.client()
    for ticket in one.tickets([], 4):
        one.put(make_trajectory(ticket))
    first, second, third, last = (make_labels(lease.trajectory.id) for lease in one.lease(["rules"], 4, 1 << 20))
    unfit = replace(second, step_scores=np.ones(1, np.float32), step_ends=np.array([99], np.int32))
    errors = one.label([first, unfit, replace(third, vote="x" * MAX_HEADER_BYTES), last])
    assert [type(error) for error in errors] == [type(None), RefusedError, WireError, type(None)]
    status = one.status()
    assert (status["labelled"], status["late_labels"]) == (2, 0)


def test_a_reply_that_cannot_be_encoded_fails_its_request_alone(tmp_path: Path) -> None:
    endless = make_task(extra_info={"number": TOO_LARGE})
    with ReplayThread(tmp_path, make_settings(feed=Feed([endless], seed=0, shuffle=False))) as replay:
        actor = replay.client()
        with pytest.raises(RefusedError, match="cannot be encoded"):
            actor.tickets([], 1)
        status = actor.status()
    assert status["refused"] == 1
    assert status["depth_tickets"] == 0, "what could not be sent has not happened"


def test_a_reply_with_many_long_tasks_is_taken(tmp_path: Path) -> None:
    long = make_task(messages=[{"role": "user", "content": "x" * (1 << 20)}])
    settings = make_settings(admission=Admission(1, 8), feed=Feed([long], seed=0, shuffle=False))
    with ReplayThread(tmp_path, settings) as replay:
        assert len(replay.client().tickets([], 8)) == 8


def test_a_wait_for_an_absent_replay_ends_on_stop_or_when_told_to_give_up(context: zmq.Context[Any]) -> None:
    stop = threading.Event()
    stop.set()
    waiting = ReplayClient("tcp://127.0.0.1:9", "a", "1", stop=stop, context=context)
    with pytest.raises(StoppedError):
        waiting.status()
    impatient = ReplayClient("tcp://127.0.0.1:9", "a", "1", give_up_s=0.1, context=context)
    with pytest.raises(UnavailableError, match="no answer from the replay"):
        impatient.status()
    impatient.close()


def test_a_client_that_was_refused_before_its_first_request_still_gives_up_in_time(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def given_up(context: zmq.Context[Any], *_: Any) -> zmq.Socket[Any]:
        """Return a socket without a connection, as ZeroMQ leaves one whose only connection was refused.

        ZeroMQ may do so after any time, so this test does not wait for it.
        """
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        return socket

    monkeypatch.setattr(replay_link, "connect", given_up)
    client = ReplayClient("tcp://127.0.0.1:9", "a", "1", give_up_s=0.1, context=context)
    with pytest.raises(UnavailableError, match="no answer from the replay"):
        client.status()
    client.close()
