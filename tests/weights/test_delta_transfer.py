"""Deltas over real sockets: who gets one, and what happens to those that cannot."""

import itertools
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio
from safetensors.torch import save_file

from asyncrl.weights.delta import diff
from asyncrl.weights.manifest import take_snapshot
from asyncrl.weights.requests import Requests
from asyncrl.weights.stored_tensors import StoredTensors
from asyncrl.weights.transfers import Transfers
from asyncrl.weights.zmq_route import ZmqRoute
from asyncrl.wire import Message
from tests.helpers import async_until
from tests.weights.fakes import HoldingEngine, following, newer, publisher, route, same_bits, shapes, some_tensors

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
        async with route(source.endpoint) as near, route(source.endpoint) as far:
            for link in (near, far):
                await link.fetch(await newer(link, -1))
                assert link.received == FULL
            for version in (1, 2, 3):
                source.publish(version, version_of(version))
                await async_until(lambda version=version: source.offered == version)
                if version != 1:
                    before = near.received
                    assert same_bits(await near.fetch(await near.newer_than(0)), version_of(version))
                    assert 0 < near.received - before < FULL / 20
            assert same_bits(await far.fetch(await far.newer_than(0)), version_of(3))
            assert far.received == FULL + version_of(3)["big"].nbytes, "the other tensors have the bytes that it had"
        assert source.measured["bytes"] == FULL
        assert source.measured["delta_bytes"] < FULL / 20
        assert source.measured["density"] == pytest.approx(200 / (20_000 + 760), rel=0.02)


async def test_a_delta_that_gives_a_wrong_result_is_refused_and_the_whole_version_follows(context):
    engine = HoldingEngine()
    with publisher(context) as source:
        async with route(source.endpoint) as link, following(link, engine, EXPECTED) as receiver:
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
        link = ZmqRoute(requests)
        first.publish(0, version_of(3))
        await link.fetch(await newer(link, -1))
        link.reset()
        requests.endpoint = second.endpoint
        second.publish(0, version_of(0))
        await async_until(lambda: second.offered == 0)
        second.publish(1, version_of(1))
        assert same_bits(await link.fetch(await newer(link, 0)), version_of(1))
        received = link.received
        link.reset()
    assert received == FULL + version_of(1)["big"].nbytes, "the other tensors have the same bytes at both"


async def test_without_deltas_nothing_is_kept_and_everything_travels_whole(context):
    with publisher(context, history=0) as source:
        async with route(source.endpoint, deltas=False) as link:
            for version in (0, 1):
                source.publish(version, version_of(version))
                assert same_bits(await link.fetch(await newer(link, version - 1)), version_of(version))
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


def stored_in(folder, tensors):
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return StoredTensors([folder / "model.safetensors"])


@pytest.mark.parametrize("deltas", [True, False])
async def test_what_the_models_files_have_does_not_travel_to_a_new_receiver(context, tmp_path, deltas):
    """All but `big` and `ids` is frozen. The files have one frozen tensor in another dtype, and one damaged."""
    files = version_of(0)
    files["embed"], files["flags"] = files["embed"].float(), ~files["flags"]
    link_of = partial(route, deltas=deltas, stored=stored_in(tmp_path, files))
    pushed = {**version_of(2), "ids": torch.arange(11) + 1}
    engine = HoldingEngine()
    with publisher(context, chunk_bytes=1000) as source:
        source.publish(7, pushed)
        async with link_of(source.endpoint) as link, following(link, engine, EXPECTED):
            await async_until(lambda: engine.version == 7)
            # A restarted engine begins as a new one does: it never serves a part.
            assert same_bits(engine.tensors, pushed)
            assert link.received == sum(pushed[name].nbytes for name in ("big", "ids", "flags"))
            # What follows travels as a delta, or without deltas whole but for what the files have.
            source.publish(8, {**pushed, "big": version_of(3)["big"]})
            await async_until(lambda: engine.version == 8)
            assert same_bits(engine.tensors, {**pushed, "big": version_of(3)["big"]})


async def test_nothing_but_the_manifest_travels_where_all_is_there_and_files_that_are_gone_cost_only_bytes(
    context, tmp_path
):
    stored = stored_in(tmp_path, some_tensors())
    with publisher(context) as source:
        source.publish(0, some_tensors())
        async with route(source.endpoint, stored=stored) as link:
            assert same_bits(await link.fetch(await newer(link, -1)), some_tensors())
            assert link.received == 0
        (tmp_path / "model.safetensors").write_bytes(b"damaged")
        async with route(source.endpoint, stored=stored) as link:
            assert same_bits(await link.fetch(await newer(link, -1)), some_tensors())
            assert link.received == sum(each.nbytes for each in some_tensors().values())


async def test_damage_in_the_memory_of_the_last_version_is_not_carried_into_the_next(context):
    with publisher(context, history=1) as source:
        source.publish(0, version_of(0))
        async with route(source.endpoint) as link:
            first = await link.fetch(await newer(link, -1))
            first["embed"][0, 0] += 1
            for version in (1, 2):
                source.publish(version, version_of(version))
                await async_until(lambda version=version: source.offered == version)
            assert same_bits(await link.fetch(await newer(link, 0)), version_of(2))
