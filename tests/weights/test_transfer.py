"""WeightServer, route and receiver together, over real sockets and where it matters with real processes."""

import asyncio
import contextlib
import logging
import subprocess
import sys

import pytest
import torch
import zmq
import zmq.asyncio

from asyncrl.errors import ConfigError, UnavailableError, WeightsError, WireError
from asyncrl.machine.ports import free_ports
from asyncrl.weights.requests import Requests
from asyncrl.weights.server import WeightServer
from asyncrl.weights.zmq_route import ZmqRoute
from asyncrl.wire import Message, decode, encode
from tests.helpers import GENEROUS_S, async_until
from tests.weights.fakes import HoldingEngine, following, newer, publisher, route, same_bits, shapes, some_tensors

pytestmark = pytest.mark.slow

EXPECTED = shapes(some_tensors())


@pytest.mark.parametrize("chunk_bytes", [1, 64, 1 << 20])
async def test_weights_arrive_bit_for_bit(context, chunk_bytes):
    engine = HoldingEngine()
    with publisher(context, chunk_bytes=chunk_bytes) as source:
        async with route(source.endpoint) as link, following(link, engine, EXPECTED):
            for version in (0, 1, 5):
                source.publish(version, some_tensors(version))
                await async_until(lambda version=version: engine.version == version)
                assert same_bits(engine.tensors, some_tensors(version))


async def test_the_manifest_of_a_mixture_with_very_many_experts_arrives(context):
    names = [f"model.layers.{i % 60}.mlp.experts.{i // 60}.some_longer_projection.weight" for i in range(60_000)]

    with publisher(context) as source:
        source.publish(0, dict.fromkeys(names, torch.ones(1)))
        async with route(source.endpoint, timeout_s=120) as link:
            manifest = await newer(link, -1)
    assert [spec.name for spec in manifest.tensors] == names


async def test_a_late_joiner_gets_only_the_newest(context):
    engine = HoldingEngine()
    with publisher(context) as source:
        for version in range(4):
            source.publish(version, some_tensors(version))
        await async_until(lambda: source.offered == 3)
        async with route(source.endpoint) as link, following(link, engine, EXPECTED):
            await async_until(lambda: engine.version == 3)
    assert engine.served == [3]
    assert same_bits(engine.tensors, some_tensors(3))


async def test_a_flipped_byte_is_refused_and_the_old_weights_stay_until_whole_ones_come(context):
    engine = HoldingEngine()
    with publisher(context) as source:
        source.publish(0, some_tensors(0))
        async with route(source.endpoint) as link, following(link, engine, EXPECTED):
            await async_until(lambda: engine.version == 0)
        damaged = some_tensors(1)
        source.publish(1, damaged)
        await async_until(lambda: source.offered == 1)
        damaged["ids"][3] ^= 1
        async with route(source.endpoint) as link, following(link, engine, EXPECTED) as receiver:
            await async_until(lambda: receiver.refused >= 2)
            assert engine.version == 0
            assert same_bits(engine.tensors, some_tensors(0))
            damaged["ids"][3] ^= 1
            await async_until(lambda: engine.version == 1)
            assert same_bits(engine.tensors, some_tensors(1))


async def test_weights_that_do_not_fit_the_engine_are_refused_before_a_byte_is_taken(context, caplog):
    class NoFetch(ZmqRoute):
        async def fetch(self, manifest):
            raise AssertionError("nothing may be fetched")

    engine = HoldingEngine()
    with publisher(context) as source:
        incomplete = some_tensors(0)
        del incomplete["scale"]
        source.publish(0, incomplete)
        link = NoFetch(Requests(source.endpoint, zmq.asyncio.Context.shadow(context)))
        async with following(link, engine, EXPECTED) as receiver:
            await async_until(lambda: receiver.refused >= 1)
        async with route(source.endpoint) as link, following(link, engine, EXPECTED) as receiver:
            await async_until(lambda: receiver.refused >= 1)
            assert engine.version == -1
            source.publish(1, some_tensors(1))
            await async_until(lambda: engine.version == 1)
    assert "1 missing (scale)" in caplog.text


async def test_a_slow_receiver_finishes_its_version_while_a_fast_one_goes_on(context):
    fast_engine = HoldingEngine()
    with publisher(context) as source:
        source.publish(0, some_tensors(0))
        async with route(source.endpoint, credits=1) as slow, route(source.endpoint) as fast:
            begun = await newer(slow, -1)
            async with following(fast, fast_engine, EXPECTED):
                await async_until(lambda: fast_engine.version == 0)
                source.publish(1, some_tensors(1))
                source.publish(2, some_tensors(2))
                await async_until(lambda: fast_engine.version == 2)
            assert same_bits(await slow.fetch(begun), some_tensors(0))
            assert (await slow.newer_than(0)).version == 2


async def test_an_older_version_is_never_taken_and_never_published(context):
    engine = HoldingEngine(version=7)
    with publisher(context) as source:
        source.publish(3, some_tensors(3))
        with pytest.raises(WeightsError, match="never moves backwards"):
            source.publish(3, some_tensors(3))
        async with route(source.endpoint) as link, following(link, engine, EXPECTED):
            async with route(source.endpoint) as other:
                assert await other.newer_than(7) is None
            assert engine.version == 7
            source.publish(8, some_tensors(8))
            await async_until(lambda: engine.version == 8)
    assert engine.served == [8]


PUBLISH = """
import sys, time, torch, zmq
from asyncrl.weights.server import WeightServer
from tests.helpers import GENEROUS_S
publisher = WeightServer("127.0.0.1", int(sys.argv[1]), zmq.Context(), chunk_bytes=4096)
publisher.publish(int(sys.argv[2]), {"a": torch.full((2_000_000,), float(sys.argv[2]))})
time.sleep(600)
"""


@contextlib.contextmanager
def publishing(port, version):
    """A publisher in a process of its own, which has one tensor of 8 MB."""
    process = subprocess.Popen([sys.executable, "-c", PUBLISH, str(port), str(version)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


LARGE = {"a": (2_000_000,)}


async def test_a_publisher_killed_in_mid_transfer_harms_no_engine_and_its_successor_is_followed(caplog):
    caplog.set_level(logging.INFO)
    port, cut = free_ports(1), []

    class KillsDuringFetch(ZmqRoute):
        """Kills the publisher with -9 as soon as the first fetch is under way."""

        async def fetch(self, manifest):
            fetching = asyncio.create_task(super().fetch(manifest))
            for _ in range(20):
                await asyncio.sleep(0)
            if not cut:
                first.kill()
                cut.append(not fetching.done())
            return await fetching

    engine = HoldingEngine(version=1)
    async with route(f"tcp://127.0.0.1:{port}", kind=KillsDuringFetch, credits=2, timeout_s=1.5) as link:
        with publishing(port, 2) as first:
            async with following(link, engine, LARGE) as receiver:
                await async_until(lambda: first.poll() is not None)
                await async_until(lambda: "waiting for the learner" in caplog.text)
                assert cut == [True]
                assert (engine.version, receiver.updates) == (1, 0)
                with publishing(port, 3):
                    await async_until(lambda: engine.version == 3)
    assert engine.served == [3]
    assert bool((engine.tensors["a"] == 3).all())


@pytest.mark.heavy
async def test_a_request_that_a_killed_publisher_took_with_it_is_made_again_at_once():
    port, engine = free_ports(1), HoldingEngine(version=1)
    async with route(f"tcp://127.0.0.1:{port}", timeout_s=3600) as link, following(link, engine, LARGE):
        with publishing(port, 2):
            await async_until(lambda: engine.version == 2)
        # It had asked for the next version, and has an hour's patience.
        with publishing(port, 3):
            await async_until(lambda: engine.version == 3)


async def test_a_receiver_says_whom_it_waits_for(caplog):
    endpoint = f"tcp://127.0.0.1:{free_ports(1)}"
    async with route(endpoint, timeout_s=0.05) as link, following(link, HoldingEngine(), EXPECTED):
        await async_until(
            lambda: "waiting for the learner: not by zmq: the weight publisher at tcp://127.0.0.1" in caplog.text
        )


async def test_nonsense_from_a_stranger_is_refused_with_a_reason_and_harms_nobody(context):
    nonsense = [
        [b""],
        [b"junk", b"more junk"],
        [b"\x00" * 1000],
        encode(Message("launch-missiles")),
        encode(Message("manifest", 1, {"holds": "everything", "base": ""})),
        encode(Message("chunk", 1, {"version": 0, "start": 0, "stop": 1 << 60})),
    ]

    engine = HoldingEngine()
    with publisher(context) as source, context.socket(zmq.DEALER) as stranger:
        stranger.connect(source.endpoint)
        source.publish(0, some_tensors(0))
        for frames in nonsense:
            stranger.send_multipart(frames)
            assert stranger.poll(1000 * GENEROUS_S), "a refusal says so"
            reply = decode(stranger.recv_multipart())
            assert reply.kind == "refused"
            assert reply.body["reason"]
        assert source.refused == len(nonsense)
        stranger.send(b"x" * (1 << 20))
        async with route(source.endpoint) as link, following(link, engine, EXPECTED):
            await async_until(lambda: engine.version == 0)


@pytest.mark.parametrize(
    "answer",
    [
        [b"junk"],
        encode(Message("manifest", 1, {"version": 3})),
        encode(Message("manifest", 99, {"version": 3, "chunk_bytes": 8, "tensors": [], "deltas": []})),
        encode(Message("manifest", 1, {"version": -5, "chunk_bytes": 8, "tensors": [], "deltas": []})),
        encode(Message("refused", 0, {"reason": "no"})),
        encode(Message("manifest", 1, {"version": 3, "chunk_bytes": 8, "tensors": [], "deltas": [{"base": "a"}]})),
    ],
)
async def test_nonsense_from_a_publisher_is_a_wire_error(context, answer):
    with context.socket(zmq.ROUTER) as impostor:
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        async with route(f"tcp://127.0.0.1:{port}", timeout_s=10) as link:
            asking = asyncio.create_task(link.newer_than(-1))
            await async_until(lambda: impostor.poll(0) > 0)
            impostor.send_multipart([impostor.recv_multipart()[0], *answer])
            with pytest.raises(WireError):
                await asking


async def test_a_silent_publisher_is_unavailable(context):
    async with route(f"tcp://127.0.0.1:{free_ports(1)}", timeout_s=0.05) as link:
        with pytest.raises(UnavailableError, match=r"silent for 0\.05 s"):
            await link.newer_than(-1)


def test_an_address_that_others_can_reach_must_be_allowed(context):
    with pytest.raises(ConfigError, match="insecure"):
        WeightServer("0.0.0.0", 0, context)
    WeightServer("0.0.0.0", 0, context, insecure=True).close()


def test_what_cannot_travel_is_refused_at_once(context):
    with publisher(context) as source:
        with pytest.raises(WeightsError, match="move it to the CPU"):
            source.publish(0, {"a": torch.zeros(2, device="meta")})
        with pytest.raises(WeightsError, match="complex64"):
            source.publish(0, {"a": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(WeightsError, match="closed"):
        source.publish(0, some_tensors())
