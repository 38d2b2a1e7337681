"""The distributed route over gloo: with engines as threads of this process, and with real ones that die."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time

import pytest
import torch
import zmq.asyncio

from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.weights.broadcast import Broadcaster
from asyncrl.weights.buckets import GatheredBucket, flatten, plan_buckets
from asyncrl.weights.distributed_route import DistributedRoute
from asyncrl.weights.group import WeightGroup
from asyncrl.weights.manifest import TensorSpec, dtype_name
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.requests import Requests
from asyncrl.weights.server import WeightServer
from asyncrl.weights.transfers import Broadcasts
from asyncrl.weights.zmq_route import ZmqRoute
from tests.helpers import GENEROUS_S, async_until, until
from tests.weights.fakes import HoldingEngine, newer, same_bits, shapes, some_tensors

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SLOW_LIMIT_S = 8.0
EXPECTED = shapes(some_tensors())


def plan_of(tensors, bucket_bytes=512):
    entries = [TensorSpec(name, dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()]
    return plan_buckets(entries, bucket_bytes)


def filled(tensors, plan):
    """Gather buckets as the learner does on the CPU."""
    for bucket in plan:
        yield GatheredBucket(bucket, flatten(bucket, tensors))


class Learner:
    """A publisher with its parts."""

    def __init__(self, context, timeout_s=20.0, make_group=WeightGroup):
        self.publisher = WeightServer("127.0.0.1", 0, context, broadcasts=Broadcasts("gloo", ""))
        # On a busy machine an engine may be between two requests for seconds.
        self.broadcaster = Broadcaster(self.publisher, "127.0.0.1", CPU, timeout_s, make_group, patience_s=20.0)
        self.push = Publisher(EXPECTED, self.publisher, self.broadcaster)

    async def publish(self, version, tensors=None, to=0):
        tensors = tensors or some_tensors(version)
        plan = plan_of(tensors)
        await self.push_to(to, version, plan, filled(tensors, plan))

    async def push_to(self, count, *arguments):
        """Push as soon as so many engines wait for it, and it waits for no other."""

        def awaited():
            is_absent = self.publisher._transfers.absent("gloo", time.monotonic())
            return self.publisher.joining("gloo") == count and not is_absent

        def push():
            # Not checked from the event loop: if that is delayed after its check, engines have stopped waiting.
            until(lambda: self.publisher._in_thread(awaited).result())
            self.push.publish(*arguments)

        await asyncio.to_thread(push)


@contextlib.asynccontextmanager
async def learning(context, **options):
    learner = Learner(context, **options)
    try:
        yield learner
    finally:
        await asyncio.to_thread(learner.push.close)


@contextlib.asynccontextmanager
async def engine_of(endpoint, timeout_s=20.0, make_group=WeightGroup):
    """An engine that follows broadcasts, else pulls."""
    context, engine = zmq.asyncio.Context(), HoldingEngine()
    links = [
        DistributedRoute(Requests(endpoint, context, timeout_s=timeout_s), CPU, timeout_s, make_group),
        ZmqRoute(Requests(endpoint, context, timeout_s=timeout_s)),
    ]
    receiver = Receiver(links, EXPECTED, retry_s=0.02)
    task = asyncio.create_task(receiver.run(engine))
    try:
        yield engine, receiver
        assert not task.done(), "a receiver never ends by itself"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        context.destroy(linger=0)


async def test_broadcasts_arrive_bit_for_bit_and_a_late_joiner_pulls_before_it_takes_part(context):
    async with learning(context) as learner, engine_of(learner.publisher.endpoint) as (one, first):
        await learner.publish(0, to=1)
        await async_until(lambda: one.version == 0)
        async with engine_of(learner.publisher.endpoint) as (two, second):
            await async_until(lambda: two.version == 0)
            assert (first.fallbacks, second.fallbacks) == (0, 1)
            for version in (1, 2):
                await learner.publish(version, to=2)
                await async_until(lambda version=version: one.version == two.version == version)
                assert same_bits(one.tensors, some_tensors(version))
                assert same_bits(two.tensors, some_tensors(version))
            assert (first.fallbacks, second.fallbacks) == (0, 1)
        assert learner.push.measured["broadcasts"] == 3
        assert learner.push.measured["broadcast_failures"] == 0


async def test_without_engines_a_push_waits_for_nobody(context):
    # A push that waited for an engine would wait for an hour.
    async with learning(context, timeout_s=3600.0) as learner:
        await learner.publish(0)
        await async_until(lambda: learner.publisher.offered == 0)
        assert learner.push.measured["broadcasts"] == 0


async def test_an_engine_whose_model_differs_refuses_before_the_first_byte_and_the_push_goes_on(context):
    async with learning(context, timeout_s=2.0) as learner:
        requests = Requests(learner.publisher.endpoint, zmq.asyncio.Context.shadow(context))
        link = DistributedRoute(requests, CPU, 2.0)
        calling = asyncio.create_task(newer(link, -1))
        await learner.publish(0, to=1)
        with pytest.raises(WeightsError, match="1 missing"):
            (await calling).check_covers({**EXPECTED, "another": (1,)})
        assert learner.push.measured["broadcast_failures"] == 1
        await async_until(lambda: learner.publisher.offered == 0)
        link.reset()
        with pytest.raises(UnavailableError, match="before this engine joined"):
            await link.newer_than(-1)
        link.reset()


async def test_tensors_that_engines_do_not_expect_refuse_the_push_before_the_first_bucket(context):
    tensors = {**some_tensors(), "another": torch.zeros(2)}
    async with learning(context) as learner:
        plan = plan_of(tensors)
        taken = filled(tensors, plan)
        with pytest.raises(WeightsError, match="1 unknown"):
            await asyncio.to_thread(learner.push.publish, 0, plan, taken)
        assert next(taken).bucket == plan[0], "no bucket was taken"


class Full(WeightGroup):
    """The group of an engine without memory for a second version."""

    def begin(self, tensor):
        raise torch.OutOfMemoryError("full")


async def test_an_engine_without_room_for_a_second_version_fails_one_broadcast_and_pulls_from_then_on(context):
    async with (
        learning(context) as learner,
        engine_of(learner.publisher.endpoint, make_group=Full) as (engine, _),
    ):
        for version in (0, 1):
            await learner.publish(version, to=1 - version)
            await async_until(lambda version=version: engine.version == version)
        assert learner.push.measured["broadcast_failures"] == 1


class Damaging(WeightGroup):
    """One bit of the first bucket that it sends is another than in the learner's memory."""

    damaged = False

    def begin(self, tensor):
        if not self.damaged:
            self.damaged = True
            tensor = tensor.clone()
            tensor[0] ^= 1
        return super().begin(tensor)


async def test_a_version_with_a_damaged_bucket_is_refused_whole(context):
    async with learning(context, make_group=Damaging) as learner:
        link = DistributedRoute(Requests(learner.publisher.endpoint, zmq.asyncio.Context.shadow(context)), CPU, 20.0)
        calling = asyncio.create_task(newer(link, -1))
        pushing = asyncio.create_task(learner.publish(0, to=1))
        with pytest.raises(WeightsError, match="version 0 arrived damaged"):
            await link.fetch(await calling)
        await pushing
        link.reset()


async def test_the_next_bucket_is_on_its_way_while_the_last_is_filled_or_summed_and_never_a_third(context):
    second_filled, calls = threading.Event(), []

    class Late(WeightGroup):
        def begin(self, tensor):
            assert second_filled.wait(GENEROUS_S)
            calls.append("begin")
            return super().begin(tensor)

        def finish(self, work):
            calls.append("finish")
            super().finish(work)

    tensors = some_tensors(0)
    plan = plan_of(tensors)

    def buckets():
        for index, each in enumerate(filled(tensors, plan)):
            if index == 1:
                second_filled.set()
            yield each

    async with (
        learning(context) as learner,
        engine_of(learner.publisher.endpoint, make_group=Late) as (engine, receiver),
    ):
        await learner.push_to(1, 0, plan, buckets())
        await async_until(lambda: engine.version == 0)
        assert same_bits(engine.tensors, tensors)
        assert (learner.push.measured["broadcasts"], receiver.fallbacks) == (1, 0)
    assert len(plan) > 2
    assert calls == ["begin", *["begin", "finish"] * len(plan), "finish"]


@pytest.mark.heavy
def test_a_learner_that_fills_its_buckets_slowly_is_not_silent(context):
    tensors = some_tensors(0)
    plan = plan_of(tensors)

    def slowly():
        for index, each in enumerate(filled(tensors, plan)):
            # Each of these is well within the limit, all three together take longer.
            time.sleep(0.35 * SLOW_LIMIT_S if index < 3 else 0)
            yield each

    async def run():
        async with (
            learning(context, timeout_s=SLOW_LIMIT_S) as learner,
            engine_of(learner.publisher.endpoint, timeout_s=SLOW_LIMIT_S) as (engine, receiver),
        ):
            await learner.push_to(1, 0, plan, slowly())
            await async_until(lambda: engine.version == 0)
            assert (learner.push.measured["broadcasts"], receiver.fallbacks) == (1, 0)

    assert len(plan) > 2
    asyncio.run(run())


DYING = """
import asyncio, os, sys, torch, zmq.asyncio
from asyncrl.weights.distributed_route import DistributedRoute
from asyncrl.weights.requests import Requests
from asyncrl.weights.group import WeightGroup
from tests.helpers import GENEROUS_S

class Dying(WeightGroup):
    first = None

    def begin(self, tensor):
        if self.first is not None:
            self.finish(self.first)
            os.kill(os.getpid(), 9)
        self.first = super().begin(tensor)
        return self.first

async def main():
    link = DistributedRoute(Requests(sys.argv[1], zmq.asyncio.Context()), torch.device("cpu"), 20.0, Dying)
    while (manifest := await link.newer_than(0)) is None:
        pass
    await link.fetch(manifest)

asyncio.run(main())
"""


@pytest.mark.heavy
async def test_an_engine_killed_in_mid_broadcast_delays_nobody_for_long_and_the_others_get_the_version(context):
    async with learning(context) as learner, engine_of(learner.publisher.endpoint) as (engine, receiver):
        await learner.publish(0, to=1)
        await async_until(lambda: engine.version == 0)
        dying = subprocess.Popen([sys.executable, "-c", DYING, learner.publisher.endpoint])
        await learner.publish(1, to=2)
        await asyncio.to_thread(dying.wait)
        await async_until(lambda: engine.version == 1)
        assert same_bits(engine.tensors, some_tensors(1))
        # By the fallback, unless everything had come before the connection broke.
        fallbacks = receiver.fallbacks
        assert (learner.push.measured["broadcast_failures"], fallbacks <= 1) == (1, True)
        await learner.publish(2, to=1)
        await async_until(lambda: engine.version == 2)
        assert receiver.fallbacks == fallbacks
        assert same_bits(engine.tensors, some_tensors(2))
