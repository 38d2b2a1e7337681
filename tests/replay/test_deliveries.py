"""Deliveries that are under way together, over a link that loses, repeats and reorders them, and a replay that dies."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import RefusedError, WireError
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.client.link import CREDITS
from asyncrl.replay.messages import decode_reply, decode_request
from asyncrl.replay.starts.admission import Admission
from asyncrl.types import Role, Ticket, ToolCall, Trajectory, Turn
from tests.helpers import GENEROUS_S, TOO_LARGE, make_trajectory
from tests.replay.support import ReplayThread, make_settings

pytestmark = pytest.mark.slow

EPISODES = 48
HELD_MS = 5
"""The time for which the link keeps a message that it lets others overtake."""
RETRY_S = 0.05


@dataclass
class Link:
    """Carries messages between one client and the replay, and does so badly: `chance` decides what it loses, repeats or
    keeps for a while. `most` is how many deliveries of one connection were without an answer at once."""

    replay: ReplayThread
    chance: random.Random
    most: int = 0
    _asked: defaultdict[bytes, set[int]] = field(default_factory=lambda: defaultdict(set))
    _answered: defaultdict[bytes, set[int]] = field(default_factory=lambda: defaultdict(set))
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._front = self.replay.context.socket(zmq.ROUTER)
        self.port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._behind = self.replay.peer()
        self._kept: list[tuple[zmq.Socket[bytes], list[bytes]]] = []
        self._client = b""
        self._thread = threading.Thread(target=self._carry)

    def _carry(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._behind, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(HELD_MS))
            if not ready:
                self.chance.shuffle(self._kept)
                while self._kept:
                    self._send(*self._kept.pop())
            if self._front in ready:
                self._client, *frames = self._front.recv_multipart()
                self._count(frames)
                self._treat(self._behind, frames)
            if self._behind in ready:
                self._treat(self._front, self._behind.recv_multipart())

    def _count(self, frames: list[bytes]) -> None:
        call = decode_request(frames)
        if call.kind == "PutTrajectory":
            # A reply to an earlier sending of a request may have overtaken the request.
            self._asked[self._client].add(call.sequence)
            self.most = max(self.most, len(self._asked[self._client] - self._answered[self._client]))

    def _treat(self, towards: zmq.Socket[bytes], frames: list[bytes]) -> None:
        fate = self.chance.random()
        if fate < 0.05:
            return
        if fate < 0.25:
            self._kept.append((towards, frames))
        if fate < 0.1 or fate >= 0.25:
            self._send(towards, frames)

    def _send(self, towards: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if towards is self._front:
            self._answered[self._client].add(decode_reply(frames).sequence)
            frames = [self._client, *frames]
        towards.send_multipart(frames)

    def __enter__(self) -> Link:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._front.close(linger=0)
        self._behind.close(linger=0)


@contextmanager
def bad_link(seed: int) -> Iterator[tuple[ReplayThread, ReplayClient, Link]]:
    with TemporaryDirectory() as folder:
        wide = make_settings(admission=Admission(max_lag=1, per_version=EPISODES))
        with ReplayThread(Path(folder), wide) as replay, Link(replay, random.Random(seed)) as link:
            replay.endpoint, own = f"tcp://127.0.0.1:{link.port}", replay.endpoint
            client = replay.client(retry_s=RETRY_S)
            replay.endpoint = own
            yield replay, client, link


def made(ticket: Ticket, kind: str) -> Trajectory:
    """The trajectory of a ticket: a good one, one that the replay refuses, or one that has no encoding."""
    large = (ToolCall("add", {"x": TOO_LARGE if kind == "unsendable" else 1}),)
    turns = (Turn(0, 4, Role.PROMPT), Turn(4, 8, Role.ASSISTANT, "stop", large))
    return make_trajectory(ticket, turns=turns, member=1 - ticket.member if kind == "unfit" else ticket.member)


def checked(kind: str, outcome: Any) -> bool:
    expected = {"good": str, "unfit": RefusedError, "unsendable": WireError}[kind]
    return isinstance(outcome, expected) and (kind != "good" or outcome in ("stored", "duplicate"))


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    kinds=st.lists(
        st.sampled_from(["good", "good", "good", "unfit", "unsendable"]), min_size=EPISODES, max_size=EPISODES
    ),
    dies=st.booleans(),
)
def test_whatever_a_link_does_each_delivery_is_stored_once_or_refused_for_its_own_fault(
    seed: int, kinds: list[str], dies: bool
) -> None:
    with bad_link(seed) as (replay, client, link):
        tickets = client.tickets([], EPISODES)
        while len(tickets) < EPISODES:
            tickets += client.tickets([each.id for each in tickets], EPISODES - len(tickets))
        sent = [made(ticket, kind) for ticket, kind in zip(tickets, kinds, strict=True)]
        outcomes: list[Any] = []
        thread = threading.Thread(target=lambda: outcomes.extend(client.put_all(sent)))
        thread.start()
        if dies:
            replay.kill()
            replay.start()
        thread.join(GENEROUS_S)
        assert len(outcomes) == EPISODES
        assert all(map(checked, kinds, outcomes))
        good = [each.id for each, kind in zip(sent, kinds, strict=True) if kind == "good"]
        with replay.store.transaction(write=False) as tx:
            assert sorted(key.decode() for key in tx.keys("data")) == sorted(good)
            assert tx.counter("accepted") == len(good)
        assert client.audit()["lost"] == 0
        assert link.most <= CREDITS
