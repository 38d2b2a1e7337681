"""The canary: what it says of an engine's answer, and that every route brings it."""

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightsError, WireError
from asyncrl.weights.canary import (
    LENGTH,
    QUANTIZED,
    TOLERANCES,
    Canary,
    CanaryCheck,
    CanaryError,
    CanaryJudge,
    canary_tokens,
)
from asyncrl.weights.disk_route import DiskRoute
from asyncrl.weights.folders import FolderWriter
from asyncrl.weights.manifest import Manifest, TensorSpec, take_snapshot
from asyncrl.weights.receiver import CANARY_FAILURES, Receiver
from asyncrl.wire import Message
from tests.helpers import OWN_RUN, async_until
from tests.weights.fakes import HoldingEngine, following, publisher, route, shapes, some_tensors
from tests.weights.test_distributed import engine_of, filled, learning, plan_of

TOKENS = tuple(range(10, 10 + LENGTH))
EXPECTED = shapes(some_tensors())


def canary_at(version: float, dtype: str = "float32") -> Canary:
    """Log-probs of spread 1 that move with the version."""
    values = np.random.default_rng(0).normal(-5, 1, LENGTH - 1) + 0.02 * version
    return Canary(TOKENS, tuple(values.tolist()), dtype)


def check_of(version: int, dtype: str = "float32", tolerance: float | None = None) -> CanaryCheck:
    return CanaryCheck(version, canary_at(version, dtype), "zmq", tolerance)


@given(st.integers(0, 1 << 40), st.integers(2, 300_000))
def test_the_tokens_are_those_of_the_run_and_one_of_each_equal_part_of_its_vocabulary(seed, vocabulary):
    """So the rows that one GPU of a server holds are never left out."""
    tokens = canary_tokens(seed, vocabulary)
    assert tokens == canary_tokens(seed, vocabulary)
    assert tokens[:5] == canary_tokens(seed, vocabulary, 5)
    if vocabulary > 1000:
        edges = np.arange(LENGTH + 1) * vocabulary // LENGTH
        assert (edges[:-1] <= sorted(tokens)).all()
        assert (sorted(tokens) < edges[1:]).all()
        assert tokens != canary_tokens(seed + 1, vocabulary)
    assert len(tokens) == LENGTH
    assert 0 <= min(tokens) <= max(tokens) < vocabulary


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "auto", QUANTIZED])
def test_the_limit_is_that_of_the_coarser_side_and_a_difference_beyond_it_fails_with_both_numbers(dtype, precision):
    judge, check = CanaryJudge(), check_of(3, dtype)
    share = max(TOLERANCES[dtype], TOLERANCES.get(precision, TOLERANCES["bfloat16"]))
    allowed, expected = share * np.std(check.canary.logprobs), np.array(check.canary.logprobs)
    signs = np.where(np.arange(LENGTH - 1) % 2, 1, -1)
    judge.judge(check, expected + 0.99 * allowed * signs, precision, "an engine")
    assert judge.counters == pytest.approx(
        {"canary_difference": 0.99 * allowed, "canary_allowed": allowed, "canary_failures": 0}, rel=1e-3
    )
    with pytest.raises(CanaryError, match=r"version 3, received by zmq, .* an engine .* differ .* allowed"):
        judge.judge(check, expected + 1.01 * allowed * signs, precision, "an engine")
    assert judge.failures == 1


def test_a_limit_may_be_named_and_log_probs_that_hardly_differ_have_one_too():
    assert check_of(0, tolerance=0.7).allowed(QUANTIZED) == pytest.approx(0.7 * np.std(canary_at(0).logprobs))
    assert CanaryCheck(0, Canary((1, 2, 3), (-4.0, -4.0), "bfloat16"), "zmq").allowed("bfloat16") > 1e-3


@pytest.mark.parametrize("answer", [[], [np.nan] * (LENGTH - 1), [-np.inf] * (LENGTH - 1)])
def test_an_answer_without_numbers_fails_and_counts_as_the_largest_difference(answer):
    judge = CanaryJudge()
    with pytest.raises(CanaryError, match="fails its canary in an engine"):
        judge.judge(check_of(0), answer, "float32", "an engine")
    assert judge.difference == np.inf


def test_an_engine_whose_sequences_are_shorter_is_judged_by_what_it_was_asked():
    check = check_of(0)
    CanaryJudge().judge(check, check.canary.logprobs[:7], "float32", "an engine", asked=8)
    with pytest.raises(CanaryError, match="over 7 tokens"):
        CanaryJudge().judge(check, check.canary.logprobs[1:8], "float32", "an engine", asked=8)


@pytest.mark.parametrize("answered", [0, 1, LENGTH - 2, LENGTH])
def test_an_answer_with_fewer_or_more_log_probs_than_were_asked_for_fails(answered):
    """One log-prob may be right by luck."""
    check, judge = check_of(0), CanaryJudge()
    answer = [*check.canary.logprobs, -1.0][:answered]
    with pytest.raises(CanaryError, match=rf"gives {answered} log-probs, {LENGTH - 1} were asked for"):
        judge.judge(check, answer, "float32", "an engine")
    assert judge.failures == 1


def test_old_weights_are_found_out_by_the_same_bits_long_before_the_limit_is_reached():
    """Several of these steps fit into the limit in bfloat16."""
    judge, stale = CanaryJudge(), np.array(canary_at(0, "bfloat16").logprobs, np.float32)
    judge.judge(check_of(0, "bfloat16"), stale, "bfloat16", "an engine")
    judge.judge(check_of(0, "bfloat16"), stale, "bfloat16", "an engine")
    with pytest.raises(CanaryError, match=r"equal those of version 0 bit for bit, .* the engine kept its old weights"):
        judge.judge(check_of(1, "bfloat16"), stale, "bfloat16", "an engine")
    judge.judge(check_of(1, "bfloat16"), np.nextafter(stale, 0), "bfloat16", "an engine")


def test_small_steps_of_the_learner_add_up_until_old_weights_are_found_out():
    judge, stale = CanaryJudge(), np.array(canary_at(0).logprobs, np.float32)
    steps = int(check_of(0, "bfloat16").allowed("bfloat16") / 10 / 0.0002)
    for step in range(steps):
        judge.judge(CanaryCheck(step, canary_at(step / 100, "bfloat16"), "zmq"), stale, "bfloat16", "an engine")
    last = CanaryCheck(steps + 1, canary_at((steps + 1) / 100, "bfloat16"), "zmq")
    with pytest.raises(CanaryError, match="the engine kept its old weights"):
        judge.judge(last, stale, "bfloat16", "an engine")


def test_a_canary_survives_its_message_and_a_malformed_one_is_refused():
    manifest = Manifest(2, 64, (TensorSpec("a", "float32", (1,)),), canary=canary_at(2))
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest
    decoder = msgspec.msgpack.Decoder(Manifest)
    assert decoder.decode(msgspec.msgpack.encode(manifest)) == manifest
    for wrong in ({"logprobs": [-1.0]}, {"logprobs": [np.nan] * 31}, {"logprobs": [1.0] * 31}, {"tokens": [-1] * 32}):
        body = {**msgspec.to_builtins(manifest), "canary": {**msgspec.to_builtins(manifest.canary), **wrong}}
        with pytest.raises(WireError):
            Message("manifest", 1, body).read(decoder)


def test_the_contents_have_one_name_whatever_the_canary():
    tensors = some_tensors()
    assert (
        take_snapshot(1, tensors, 64, canary=canary_at(1)).manifest.digest
        == take_snapshot(2, tensors, 64).manifest.digest
    )


def test_a_canary_with_ids_that_the_model_does_not_have_is_refused():
    canary_at(0).check_ids(max(TOKENS) + 1)
    with pytest.raises(WeightsError, match="must load the same model"):
        canary_at(0).check_ids(max(TOKENS))


def assert_checked(engine: HoldingEngine, name: str) -> None:
    assert engine.checks[-1] == CanaryCheck(engine.version, canary_at(engine.version), name)


@pytest.mark.slow
async def test_zmq_brings_it_with_whole_versions_and_with_deltas(context):
    engine = HoldingEngine()
    with publisher(context) as source:
        async with route(source.endpoint) as link, following(link, engine, EXPECTED):
            for version in range(3):
                source.publish(version, some_tensors(version // 2), canary_at(version))
                await async_until(lambda version=version: engine.version == version)
                assert_checked(engine, "zmq")
            source.publish(3, some_tensors(3))
            await async_until(lambda: engine.version == 3)
            assert engine.checks[-1] is None, "the learner sends none"


@pytest.mark.slow
async def test_the_disk_brings_it(tmp_path):
    engine = HoldingEngine()
    writer = FolderWriter(tmp_path, lambda folder: None, OWN_RUN)
    async with following(DiskRoute(tmp_path, OWN_RUN), engine, EXPECTED):
        writer.write(0, some_tensors(), canary_at(0))
        await async_until(lambda: engine.version == 0)
        assert_checked(engine, "disk")
    writer.close()


@pytest.mark.slow
async def test_a_broadcast_brings_it_and_the_zmq_beside_it_too(context):
    async with learning(context) as learner, engine_of(learner.publisher.endpoint) as (engine, _):
        for version in range(2):
            tensors = some_tensors(version)
            plan = plan_of(tensors)
            await learner.push_to(1, version, plan, filled(tensors, plan), canary_at(version))
            await async_until(lambda version=version: engine.version == version)
            assert_checked(engine, "distributed")
        async with engine_of(learner.publisher.endpoint) as (late, _):
            await async_until(lambda: late.version == 1)
            assert_checked(late, "zmq")


class Failing(HoldingEngine):
    """Fails as many checks in a row as `failures` has for the version."""

    def __init__(self, failures: dict[int, int]) -> None:
        super().__init__()
        self.failures = failures
        self.asked = 0

    async def update_weights(self, version, tensors, check=None):
        self.asked += 1
        if self.failures.get(version, 0) > 0:
            self.failures[version] -= 1
            raise CanaryError(f"version {version} is not what it says")
        await super().update_weights(version, tensors, check)


@pytest.mark.slow
async def test_failed_checks_are_counted_and_tried_again_and_an_engine_that_only_fails_ends_its_actor(context):
    engine = Failing({0: CANARY_FAILURES - 1, 1: CANARY_FAILURES})
    with publisher(context) as source:
        async with route(source.endpoint) as link:
            receiver = Receiver([link], EXPECTED, retry_s=0.01)
            running = asyncio.create_task(receiver.run(engine))
            source.publish(0, some_tensors(), canary_at(0))
            await async_until(lambda: engine.version == 0)
            assert receiver.refused == CANARY_FAILURES - 1
            source.publish(1, some_tensors(1), canary_at(1))
            with pytest.raises(CanaryError, match=f"version 1 is not what it says. This was failure {CANARY_FAILURES}"):
                await running
    assert engine.served == [0]


@pytest.mark.slow
async def test_only_failed_checks_in_a_row_end_an_engine(context):
    engine = Failing(dict.fromkeys(range(3), CANARY_FAILURES - 1))
    with publisher(context) as source:
        async with route(source.endpoint) as link:
            receiver = Receiver([link], EXPECTED, retry_s=0.01)
            running = asyncio.create_task(receiver.run(engine))
            for version in range(3):
                source.publish(version, some_tensors(version), canary_at(version))
                await async_until(lambda version=version: engine.version == version or running.done())
            assert engine.served == [0, 1, 2]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
