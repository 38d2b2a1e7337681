"""Deltas over real sockets: who gets one, and what happens to those that cannot."""

import itertools
import weakref

import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio

from asyncrl.weights.channels.requests import Requests
from asyncrl.weights.channels.zmq import ZmqChannel
from asyncrl.weights.delta import diff
from asyncrl.weights.manifest import take_snapshot
from asyncrl.weights.transfers import Transfers
from asyncrl.wire import Message
from tests.helpers import async_until
from tests.weights.fakes import HoldingEngine, channel, following, publisher, same_bits, shapes, some_tensors

pytestmark = pytest.mark.slow


def version_of(number):
    """A version that differs from the one before it in one element in a hundred of a large tensor."""
    big = torch.zeros(20_000)
    for step in range(1, number + 1):
        big[step::100] = float(step)
    return {**some_tensors(), "big": big}


EXPECTED = shapes(version_of(0))
FULL = sum(tensor.nbytes for tensor in version_of(0).values())


async def test_who_follows_gets_deltas_and_who_is_new_or_far_behind_the_whole(context):
    with publisher(context, history=2) as source:
        source.publish(0, version_of(0))
        async with channel(source.endpoint) as near, channel(source.endpoint) as far:
            for link in (near, far):
                await link.fetch(await link.newer_than(-1))
                assert link.received == FULL
            for version in (1, 2, 3):
                source.publish(version, version_of(version))
                await async_until(lambda version=version: source.offered == version)
                if version != 1:
                    before = near.received
                    assert same_bits(await near.fetch(await near.newer_than(0)), version_of(version))
                    assert 0 < near.received - before < FULL / 20
            assert same_bits(await far.fetch(await far.newer_than(0)), version_of(3))
            assert far.received == 2 * FULL
        assert source.measured["bytes"] == FULL
        assert source.measured["delta_bytes"] < FULL / 20
        assert source.measured["density"] == pytest.approx(200 / (20_000 + 760), rel=0.02)


async def test_a_delta_that_gives_a_wrong_result_is_refused_and_the_whole_version_follows(context):
    engine = HoldingEngine()
    with publisher(context) as source:
        async with channel(source.endpoint) as link, following(link, engine, EXPECTED) as receiver:
            source.publish(0, version_of(0))
            await async_until(lambda: engine.version == 0)
            engine.tensors["big"][7] = 5.0
            source.publish(1, version_of(1))
            await async_until(lambda: engine.version == 1)
            assert receiver.refused == 1
            assert same_bits(engine.tensors, version_of(1))


async def test_the_base_is_known_by_its_contents_so_that_another_publishers_is_never_mistaken_for_it(context):
    with publisher(context) as first, publisher(context) as second:
        requests = Requests(first.endpoint, zmq.asyncio.Context.shadow(context))
        link = ZmqChannel(requests)
        first.publish(0, version_of(3))
        await link.fetch(await link.newer_than(-1))
        link.reset()
        requests.endpoint = second.endpoint
        second.publish(0, version_of(0))
        await async_until(lambda: second.offered == 0)
        second.publish(1, version_of(1))
        assert same_bits(await link.fetch(await link.newer_than(0)), version_of(1))
        assert link.received == 2 * FULL
        link.reset()


async def test_without_deltas_nothing_is_kept_and_everything_travels_whole(context):
    with publisher(context, history=0) as source:
        async with channel(source.endpoint, deltas=False) as link:
            for version in (0, 1):
                source.publish(version, version_of(version))
                assert same_bits(await link.fetch(await link.newer_than(version - 1)), version_of(version))
            assert link.received == 2 * FULL
        assert "delta_bytes" not in source.measured


def test_deltas_that_together_are_larger_than_the_version_are_not_offered():
    rng = np.random.default_rng(0)
    snapshots = [take_snapshot(i, {"a": torch.from_numpy(rng.random(100))}, 64) for i in range(3)]
    offers = Transfers(5.0, history=4)
    offers.offer(snapshots[0])
    for old, new in itertools.pairwise(snapshots):
        offers.offer(new, diff(old, new))
    offers.handle(b"r", Message("manifest", 1, {"holds": 0, "base": snapshots[0].manifest.digest}), 0.0)
    ((_, reply),) = offers.due(0.0)
    assert reply.content.deltas == ()


def test_a_delta_that_is_no_smaller_than_its_version_is_let_go_of():
    offers = Transfers(5.0, history=4)
    first, second = (take_snapshot(i, {"a": torch.full((100,), float(i))}, 64) for i in range(2))
    offers.offer(first)
    delta = diff(first, second)
    payload = weakref.ref(delta.payload)
    assert len(delta.payload) == second.manifest.nbytes
    offers.offer(second, delta)
    del delta
    assert payload() is None
