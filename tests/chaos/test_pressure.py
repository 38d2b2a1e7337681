"""Peers that break the rules of a queue, and clocks that jump: memory stays bounded, and the others go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from asyncrl.replay.labels.leases import LONGEST_LEASES
from asyncrl.replay.messages import encode_request
from asyncrl.replay.protocol import Fetch, PutTrajectory, RenewLease
from asyncrl.types import RunIdentity
from asyncrl.wire import encode, trajectory_message
from tests.chaos.support import ReplayProcess
from tests.helpers import GENEROUS_S, make_trajectory, until
from tests.replay.support import Core, ReplayThread, make_settings

pytestmark = pytest.mark.slow

LENGTH = 8192
LONG = (f"actor.max_tokens={LENGTH}", f"engine.max_length={LENGTH}")
LEASE_S = 10.0
MEMORY_BYTES = 96 << 20
"""The memory that a replay may need beyond that at rest, while one peer asks for a gigabyte and reads nothing."""


@pytest.fixture
def replay(tmp_path: Path) -> Iterator[ReplayProcess]:
    settings = ("learner.batch_size=16", "learner.group_size=2", "replay.durability=os", *LONG)
    with ReplayProcess(tmp_path, *settings) as replay:
        yield replay


def test_a_consumer_that_never_reads_costs_bounded_memory_and_holds_up_nobody(replay: ReplayProcess) -> None:
    actor = replay.client("a")
    tickets = actor.tickets([], 16)
    actor.put_all([make_trajectory(ticket, length=LENGTH) for ticket in tickets])
    ids = [ticket.id for ticket in tickets]
    at_rest = replay.resident_bytes()
    with zmq.Context() as context:
        slow = context.socket(zmq.DEALER)
        slow.linger, slow.rcvhwm, slow.sndhwm = 0, 1, 0
        slow.connect(replay.endpoint)
        for sequence in range(1000):
            slow.send_multipart(encode_request(Fetch("data", ids), sequence, RunIdentity("run")))
        largest = 0
        for _ in range(40):
            assert len(actor.fetch(ids)) == len(ids)
            largest = max(largest, replay.resident_bytes())
        slow.close()
    assert largest - at_rest < MEMORY_BYTES


def test_a_producer_that_floods_costs_bounded_memory_and_holds_up_nobody(replay: ReplayProcess) -> None:
    actor = replay.client("a")
    tickets = actor.tickets([], 2)
    at_rest = replay.resident_bytes()
    stop = threading.Event()
    flooding = threading.Thread(target=flood, args=(replay.endpoint, stop))
    flooding.start()
    assert actor.put(make_trajectory(tickets[0])) == "stored"
    until(lambda: actor.status()["late"] > 500)
    assert replay.resident_bytes() - at_rest < MEMORY_BYTES
    assert actor.put(make_trajectory(tickets[1])) == "stored"
    stop.set()
    flooding.join(GENEROUS_S)


def flood(endpoint: str, stop: threading.Event) -> None:
    """Send trajectories of unknown tickets, as fast as they are taken, and never read an answer."""
    made = encode(trajectory_message(make_trajectory(length=LENGTH, id="t999999999.0.0")))
    frames = encode_request(PutTrajectory(0), 1, RunIdentity("run"), made)
    with zmq.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.linger, socket.rcvhwm = 0, 1
        socket.connect(endpoint)
        while not stop.is_set():
            if socket.poll(100, zmq.POLLOUT):
                socket.send_multipart(frames)
        socket.close()


def test_a_scorer_that_renews_for_ever_and_delivers_nothing_loses_its_lease(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(), LEASE_S)
    for ticket in core.tickets(4):
        core.put(make_trajectory(ticket))
    stuck = [each.id for each in core.lease(2, worker="stuck")]
    beats = 0
    while core.status()["leases_redelivered"] == 0:
        core.ask(RenewLease("stuck"))
        core.tick(LEASE_S / 2)
        beats += 1
        assert beats < 3 * LONGEST_LEASES
    assert beats > LONGEST_LEASES
    for _ in range(4):
        for each in core.lease(4, worker="other"):
            core.label(each.id, worker="other")
    assert core.plan(0) is not None
    assert core.status()["late_labels"] == 0
    core.label(stuck[0], worker="stuck")
    assert core.status()["late_labels"] == 1


def test_a_scorer_that_delivers_now_and_then_keeps_its_lease(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(), LEASE_S)
    for ticket in core.tickets(4):
        core.put(make_trajectory(ticket))
    for each in core.lease(4, worker="slow"):
        for _ in range(LONGEST_LEASES):
            core.ask(RenewLease("slow"))
            core.tick(LEASE_S * 0.9)
        core.label(each.id, worker="slow")
    assert (core.status()["leases_redelivered"], core.status()["late_labels"]) == (0, 0)


def test_an_actor_that_holds_tickets_for_ever_is_replaced(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(longest_episode_s=30.0), LEASE_S)
    stuck = core.tickets(4, worker="stuck")
    others = core.tickets(4, worker="other")
    for ticket in others:
        core.put(make_trajectory(ticket))
    held = [ticket.id for ticket in stuck]
    for _ in range(5):
        core.tickets(0, worker="stuck", holding=held)
        core.tick(8.0)
    again = core.tickets(8, worker="other", holding=[])
    assert {(ticket.group_id, ticket.member) for ticket in again} == {(each.group_id, each.member) for each in stuck}
    assert not {ticket.id for ticket in again} & set(held)
    for ticket in again:
        assert core.put(make_trajectory(ticket)) == "stored"
    assert core.put(make_trajectory(stuck[0])) == "late"
    for each in core.lease():
        core.label(each.id)
    assert core.plan(0) is not None
    assert core.plan(1) is not None
    assert core.audit()["lost"] == 0


def test_the_time_of_an_episode_that_waits_for_its_version_does_not_run(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(longest_episode_s=30.0), LEASE_S)
    held = [ticket.id for ticket in core.tickets(2)]
    for _ in range(10):
        core.tickets(0, holding=held, waiting=held[:1])
        core.tick(8.0)
    assert core.status()["failures"] == 1
    core.tickets(0, holding=held[:1])
    for _ in range(5):
        core.tick(8.0)
        core.tickets(0, holding=held[:1])
    assert core.status()["failures"] == 2


def test_a_restarted_replay_gives_every_ticket_its_full_time_again(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(longest_episode_s=30.0), LEASE_S)
    held = [ticket.id for ticket in core.tickets(2, worker="a")]
    for restart in (True, False):
        for _ in range(3):
            core.tick(8.0)
            core.tickets(0, worker="a", holding=held)
        if restart:
            core.restart()
    assert core.status()["failures"] == 0


def test_a_wall_clock_that_jumps_takes_no_lease_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayThread(tmp_path) as replay:
        actor, scorer = replay.client("a"), replay.client("s")
        first, second = actor.tickets([], 2)
        actor.put(make_trajectory(first))
        assert len(scorer.lease(["rules"], 1, 1000)) == 1
        for jump in (1e9, -1e9):
            monkeypatch.setattr("time.time", lambda jump=jump: jump)
            for _ in range(3):
                assert actor.tickets([second.id], 0) == []
                scorer.renew()
        status = actor.status()
        assert (status["tickets_redelivered"], status["leases_redelivered"]) == (0, 0)
        assert actor.put(make_trajectory(second)) == "stored"
