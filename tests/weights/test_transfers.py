import itertools

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncrl.errors import WireError
from asyncrl.weights.delta import Delta, diff
from asyncrl.weights.manifest import DeltaHeader, Patch, take_snapshot
from asyncrl.weights.transfers import POLL_S, Broadcasts, Transfers
from asyncrl.wire import Message

FORGET_S = 5.0
RECEIVERS = st.sampled_from([b"one", b"two", b"three"])


class OffersMachine(RuleBasedStateMachine):
    """Receivers that ask, fetch, fall silent and come back while versions are offered in any order."""

    def __init__(self):
        super().__init__()
        self.offers = Transfers(FORGET_S)
        self.now = 0.0
        self.newest = -1
        self.waiting = {}
        self.transfers = {}

    def deliver(self):
        for receiver, reply in self.offers.due(self.now):
            holds, asked = self.waiting.pop(receiver)
            if reply.kind == "manifest":
                version = reply.content.version
                assert version == self.newest > holds
                self.transfers[receiver] = (version, self.now)
            else:
                assert reply.kind == "nothing"
                assert self.newest <= holds
                assert self.now >= asked + POLL_S

    @rule(version=st.integers(0, 20))
    def offer(self, version):
        self.offers.offer(take_snapshot(version, {"a": torch.full((8,), float(version))}, 16))
        self.newest = max(self.newest, version)
        self.deliver()

    @rule(receiver=RECEIVERS, holds=st.integers(-1, 20))
    def ask(self, receiver, holds):
        assert self.offers.handle(receiver, Message("manifest", 1, {"holds": holds, "base": ""}), self.now) is None
        self.waiting[receiver] = (holds, self.now)
        self.transfers.pop(receiver, None)
        self.deliver()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def fetch(self, data):
        receiver = data.draw(st.sampled_from(sorted(self.transfers)))
        version, _ = self.transfers[receiver]
        body = {"version": version, "start": 16, "stop": 32}
        reply = self.offers.handle(receiver, Message("chunk", 7, body), self.now)
        assert reply.sequence == 7
        assert reply.arrays["0"].tobytes() == torch.full((4,), float(version)).numpy().tobytes()
        self.transfers[receiver] = (version, self.now)

    @rule(seconds=st.floats(0.1, FORGET_S + 1))
    def time_passes(self, seconds):
        self.now += seconds
        self.transfers = {r: (v, t) for r, (v, t) in self.transfers.items() if self.now - t <= FORGET_S}
        self.deliver()

    @invariant()
    def nobody_waits_without_reason(self):
        for holds, asked in self.waiting.values():
            assert self.newest <= holds
            assert self.now < asked + POLL_S

    @invariant()
    def memory_holds_the_newest_and_those_in_transfer(self):
        newest = {self.newest} - {-1}
        assert self.offers.kept == newest | {version for version, _ in self.transfers.values()}


OffersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestOffers = pytest.mark.slow(OffersMachine.TestCase)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"start": -4},
        {"start": 16},
        {"stop": 32},
        {"start": 24, "stop": 40},
        {"start": 40, "stop": 41},
        {"stop": "x"},
        {"stop": None},
    ],
)
def test_bytes_that_are_not_there_or_too_many_at_once_are_refused(change):
    offers = Transfers(FORGET_S)
    offers.offer(take_snapshot(1, {"a": torch.zeros(8)}, 16))
    offers.handle(b"r", Message("manifest", 1, {"holds": -1, "base": ""}), 0.0)
    assert [reply.kind for _, reply in offers.due(0.0)] == ["manifest"]
    body = {"version": 1, "start": 0, "stop": 16}
    assert offers.handle(b"r", Message("chunk", 2, body), 0.0) is not None
    with pytest.raises(WireError):
        offers.handle(b"r", Message("chunk", 3, body | change), 0.0)


def test_a_forgotten_receiver_is_told_to_start_again():
    offers = Transfers(FORGET_S)
    offers.offer(take_snapshot(1, {"a": torch.zeros(8)}, 16))
    offers.handle(b"r", Message("manifest", 1, {"holds": -1, "base": ""}), 0.0)
    list(offers.due(0.0))
    list(offers.due(FORGET_S + 1))
    body = {"version": 1, "start": 0, "stop": 16}
    with pytest.raises(WireError, match="ask for the manifest"):
        offers.handle(b"r", Message("chunk", 2, body), FORGET_S + 1)


def joins(transfers, receiver, backend="nccl", gpu="a"):
    return transfers.handle(receiver, Message("join", 1, {"holds": -1, "backend": backend, "gpu": gpu}), 0.0)


@pytest.mark.parametrize(
    ("broadcasts", "reason"),
    [
        (None, "broadcasts nothing"),
        (Broadcasts("gloo", ""), "broadcasts by gloo"),
        (Broadcasts("nccl", "a"), "on the same GPU"),
    ],
)
def test_a_receiver_that_can_never_take_part_in_a_broadcast_is_excluded_with_the_reason(broadcasts, reason):
    transfers = Transfers(FORGET_S, broadcasts=broadcasts)
    reply = joins(transfers, b"r")
    assert reply.kind == "excluded"
    assert reason in reply.body["reason"]
    assert not transfers.joining("nccl")


def test_of_receivers_on_one_gpu_one_takes_part():
    transfers = Transfers(FORGET_S, broadcasts=Broadcasts("nccl", "learner's"))
    for receiver, gpu in ((b"1", "a"), (b"2", "b"), (b"3", "a")):
        assert joins(transfers, receiver, gpu=gpu) is None
    assert transfers.joining("nccl") == (b"1", b"2")
    processors = Transfers(FORGET_S, broadcasts=Broadcasts("gloo", ""))
    for receiver in (b"1", b"2"):
        assert joins(processors, receiver, "gloo", "") is None
    assert processors.joining("gloo") == (b"1", b"2")


def test_a_receiver_that_waits_for_its_broadcast_is_not_absent_if_another_on_its_gpu_takes_part():
    transfers = Transfers(FORGET_S, broadcasts=Broadcasts("nccl", "learner's"))
    for receiver in (b"1", b"2"):
        assert joins(transfers, receiver, gpu="a") is None
    assert not transfers.absent("nccl", 0.0)
    assert [reply.kind for _, reply in transfers.due(POLL_S)] == ["nothing", "nothing"]
    assert transfers.absent("nccl", POLL_S)


def changed_at(place):
    """A version of one large tensor in which only one element is not 0."""
    tensor = torch.zeros(4096)
    tensor[place] = 1.0
    return {"a": tensor}


def manifest_for(transfers, base):
    transfers.handle(b"r", Message("manifest", 1, {"holds": -1, "base": base}), 0.0)
    [(_, reply)] = transfers.due(0.0)
    return reply.content


def test_a_version_that_is_offered_again_does_not_take_the_place_of_the_first():
    transfers = Transfers(FORGET_S)
    first, second = (take_snapshot(1, changed_at(place), 16) for place in range(2))
    transfers.offer(first)
    transfers.offer(second)
    assert manifest_for(transfers, "").digest == first.manifest.digest


def test_deltas_that_end_before_a_version_that_came_without_one_are_let_go_of():
    transfers = Transfers(FORGET_S, history=4)
    first, second, third = (take_snapshot(version, changed_at(version), 16) for version in range(3))
    transfers.offer(first)
    transfers.offer(second, diff(first, second))
    assert len(manifest_for(transfers, first.manifest.digest).deltas) == 1
    transfers.offer(third)
    assert manifest_for(transfers, first.manifest.digest).deltas == ()


def test_a_chain_of_deltas_that_is_no_smaller_than_the_version_is_not_sent():
    transfers = Transfers(FORGET_S, history=4)
    versions = [take_snapshot(version, changed_at(version), 16) for version in range(3)]
    transfers.offer(versions[0])
    half = versions[0].manifest.nbytes // 2
    for old, new in itertools.pairwise(versions):
        header = DeltaHeader(old.manifest.digest, new.manifest.digest, (Patch(0, 1, 1, half),))
        transfers.offer(new, Delta(header, np.zeros(half, np.uint8)))
    assert len(manifest_for(transfers, versions[1].manifest.digest).deltas) == 1
    assert manifest_for(transfers, versions[0].manifest.digest).deltas == ()
