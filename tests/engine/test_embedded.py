"""The engine against plain forward passes, while sessions join and leave, weights switch, and passes fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MambaConfig, RwkvConfig

from asyncrl.config.schema import EngineConfig, ModelConfig
from asyncrl.engine.base import Generation
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.own_weights import OwnWeights
from asyncrl.errors import ConfigError, EngineError, WeightsError
from asyncrl.types import Sampling
from asyncrl.weights.folders import read_folder, write_folder
from tests.engine.support import VOCABULARY, assert_exact, parameters, prompt, tiny_model
from tests.helpers import GENEROUS_S, async_until

pytestmark = pytest.mark.slow

BOTH = pytest.mark.parametrize("static", [False, True], ids=["usual", "static"])
"""Passes of the usual kind, and passes of fixed shapes as on a GPU."""

LONG = Sampling(1.0, 400)
START = prompt(np.random.default_rng(0), 10)


@asynccontextmanager
async def serving(
    model: Any = None, *, slots: int = 4, max_length: int = 500, initial_version: int = 0, **options: Any
) -> AsyncIterator[EmbeddedEngine]:
    """An engine that serves version 0 of the tiny model by default."""
    config = EngineConfig(slots=slots, max_length=max_length)
    engine = EmbeddedEngine(model or tiny_model(), config, initial_version=initial_version, **options)
    try:
        yield engine
    finally:
        await engine.close()


async def sample(engine: EmbeddedEngine, count: int, session: str = "s") -> Generation:
    return await engine.generate(START, Sampling(1.0, count), (), session)


@BOTH
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
async def test_logprobs_equal_a_plain_forward_at_every_temperature_with_more_requests_than_slots(
    family: str, static: bool
) -> None:
    rng, model = np.random.default_rng(0), tiny_model(family=family)
    temperatures = [0.0, 0.5, 1.0, 1.7] * 4
    prompts = [prompt(rng, int(length)) for length in rng.integers(1, 40, 16)]
    async with serving(tiny_model(family=family), prefill_tokens=11, static=static) as engine:
        calls = [
            engine.generate(start, Sampling(temperature, 5 + i), (), f"s{i}")
            for i, (start, temperature) in enumerate(zip(prompts, temperatures, strict=True))
        ]
        taken = await asyncio.gather(*calls)
    for i, (start, got, temperature) in enumerate(zip(prompts, taken, temperatures, strict=True)):
        assert len(got.tokens) == 5 + i
        assert_exact({0: model}, start, got, temperature)


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_the_likeliest_tokens_are_those_of_the_distribution_that_was_sampled_from(
    temperature: float, static: bool
) -> None:
    async with serving(static=static) as engine:
        wanted, plain = await asyncio.gather(
            engine.generate(START, Sampling(temperature, 30, alternatives=3), (), "wanted"),
            engine.generate(START, Sampling(temperature, 6), (), "plain"),
        )
    assert plain.alternatives is None
    assert wanted.alternatives is not None
    tokens, logprobs = wanted.alternatives
    assert tokens.shape == logprobs.shape == (30, 3)
    for sampled, logprob, likely, theirs in zip(wanted.tokens, wanted.logprobs, tokens, logprobs, strict=True):
        assert (np.diff(theirs) <= 0).all()
        if temperature == 0:
            assert sampled == likely[0]
        if sampled in likely:
            assert theirs[likely == sampled] == logprob
        else:
            assert logprob <= theirs[-1]


TURN = st.tuples(st.integers(1, 25), st.integers(1, 20), st.sampled_from([0.0, 0.6, 1.0]))
EPISODE = st.tuples(
    st.integers(0, 60),
    st.lists(TURN, min_size=1, max_size=4),
    st.sampled_from(["runs", "runs", "released", "cancelled"]),
)


@settings(max_examples=20, deadline=None)
@given(
    episodes=st.lists(EPISODE, min_size=1, max_size=9),
    switches=st.lists(st.integers(1, 80), max_size=3),
    slots=st.integers(1, 5),
    prefill_tokens=st.integers(1, 40),
    static=st.booleans(),
)
def test_logprobs_are_exact_through_joins_turns_aborts_and_weight_switches(
    episodes, switches, slots, prefill_tokens, static
):
    models = {version: tiny_model(seed=version) for version in range(len(switches) + 1)}
    rng = np.random.default_rng(1)

    async def episode(engine: EmbeddedEngine, index: int, delay: int, turns: list[Any], fate: str) -> None:
        await sampled(engine, delay)
        tokens = np.zeros(0, np.int32)
        for length, new, temperature in turns:
            tokens = np.concatenate([tokens, prompt(rng, length)])
            call = asyncio.ensure_future(engine.generate(tokens, Sampling(temperature, new), [7], f"s{index}"))
            if fate == "released":
                await sampled(engine, delay + 9)
                engine.release(f"s{index}")
            if fate == "cancelled":
                await sampled(engine, delay + 9)
                call.cancel()
            got = (await asyncio.gather(call, return_exceptions=True))[0]
            if isinstance(got, asyncio.CancelledError):
                continue
            assert_exact(models, tokens, got, temperature)
            tokens = np.concatenate([tokens, got.tokens])
        engine.release(f"s{index}")

    async def sampled(engine: EmbeddedEngine, tokens: int) -> None:
        """Wait for so many tokens, or until nothing goes on."""
        await async_until(lambda: engine.stats().tokens >= tokens or engine.stats().running == 0)

    async def switch(engine: EmbeddedEngine) -> None:
        for version, tokens in enumerate(sorted(switches), 1):
            await sampled(engine, tokens)
            await engine.update_weights(version, parameters(models[version]))

    async def main() -> None:
        async with serving(slots=slots, prefill_tokens=prefill_tokens, static=static) as engine:
            await asyncio.gather(switch(engine), *(episode(engine, i, *each) for i, each in enumerate(episodes)))
            await async_until(lambda: engine.stats().running == 0)

    asyncio.run(asyncio.wait_for(main(), GENEROUS_S))


@BOTH
async def test_a_generation_in_flight_goes_on_under_new_weights_with_the_version_of_every_token(static: bool) -> None:
    models = {version: tiny_model(seed=version) for version in (0, 4, 9)}
    async with serving(static=static) as engine:
        call = asyncio.create_task(sample(engine, 400))
        for version in (4, 9):
            tokens = engine.stats().tokens
            await async_until(lambda reached=tokens + 5: engine.stats().tokens >= reached)
            await engine.update_weights(version, parameters(models[version]))
            assert engine.version == version
        got = await call
    assert sorted(set(got.versions.tolist())) == [0, 4, 9]
    assert (np.diff(got.versions) >= 0).all()
    assert len(got.tokens) == 400
    assert_exact(models, START, got, 1.0)


@BOTH
async def test_a_turn_after_a_weight_switch_uses_no_key_of_the_older_version(static: bool) -> None:
    newer = tiny_model(seed=1)
    async with serving(static=static) as engine:
        first = await sample(engine, 5)
        await engine.update_weights(1, parameters(newer))
        longer = np.concatenate([START, first.tokens])
        second = await engine.generate(longer, Sampling(1.0, 30), (), "s")
    assert set(second.versions) == {1}
    assert_exact({1: newer}, longer, second, 1.0)


async def test_a_second_turn_computes_only_its_suffix_and_a_session_with_a_known_prompt_only_its_last_token() -> None:
    model, computed = tiny_model(), list[int]()
    async with serving(model, max_length=100) as engine:
        model.register_forward_pre_hook(
            lambda _, __, kwargs: computed.append(kwargs["position_ids"].numel()), with_kwargs=True
        )
        first = await sample(engine, 3)
        longer = np.concatenate([START, first.tokens, START[:4]])
        await engine.generate(longer, Sampling(1.0, 2), (), "s")
        computed.append(0)
        third = await sample(engine, 3, "another")
    # The last token of a turn has not been computed when the turn ends. The other session has the same prompt.
    assert computed == [10, 1, 1, 5, 1, 0, 1, 1, 1]
    assert_exact({0: tiny_model()}, START, third, 1.0)


@BOTH
async def test_what_is_sampled_depends_on_seed_and_session_and_not_on_the_batch(static: bool) -> None:
    rng = np.random.default_rng(0)
    cases = [(prompt(rng, 5 + 3 * i), Sampling(0.0 if i % 2 else 1.0, 30), (), f"s{i}") for i in range(9)]

    async def tokens(seed: int, together: bool) -> list[list[int]]:
        async with serving(seed=seed, static=static) as engine:
            if together:
                taken = await asyncio.gather(*(engine.generate(*case) for case in cases))
            else:
                taken = [await engine.generate(*case) for case in cases]
        return [got.tokens.tolist() for got in taken]

    reference = await tokens(seed=3, together=True)
    assert await tokens(seed=3, together=False) == reference
    other = await tokens(seed=4, together=False)
    same = [ours == theirs for ours, theirs in zip(other, reference, strict=True)]
    assert same == [sampling.temperature == 0 for _, sampling, _, _ in cases]


@BOTH
async def test_a_turn_ends_with_its_stop_token_or_its_limit_or_a_full_slot(static: bool) -> None:
    async with serving(max_length=32, static=static) as engine:
        free = await engine.generate(START, Sampling(0.0, 8), (), "s")
        stop = int(free.tokens[3])
        stopped = await engine.generate(START, Sampling(0.0, 8), [VOCABULARY + 5, stop], "s")
        full = await engine.generate(START, LONG, (), "s")
    assert (free.finish_reason, len(free.tokens)) == ("length", 8)
    first = free.tokens.tolist().index(stop) + 1
    assert (stopped.finish_reason, stopped.tokens.tolist()) == ("stop", free.tokens[:first].tolist())
    assert (full.finish_reason, len(full.tokens)) == ("length", 22)
    assert (free.tokens.dtype, free.logprobs.dtype, free.versions.dtype) == (np.int32, np.float32, np.int32)


@BOTH
async def test_a_released_or_cancelled_session_frees_its_slot_and_a_released_one_returns_what_there_is(
    static: bool,
) -> None:
    async with serving(slots=1, static=static) as engine:
        running, waiting = (asyncio.create_task(sample(engine, 400, name)) for name in ("running", "waiting"))
        await async_until(lambda: engine.stats().tokens >= 5)
        engine.release("waiting")
        assert (await waiting).finish_reason == "abort"
        engine.release("running")
        got = await running
        assert got.finish_reason == "abort"
        assert 5 <= len(got.tokens) < 400
        assert_exact({0: tiny_model()}, START, got, 1.0)
        assert engine.stats().running == 0
        engine.release("unknown")
        cancelled = asyncio.create_task(sample(engine, 400, "running"))
        await async_until(lambda: engine.stats().running == 1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert len((await sample(engine, 3, "running")).tokens) == 3


async def test_tokens_that_do_not_fit_and_a_second_turn_of_a_session_are_refused() -> None:
    refused = [([], "at least 1"), ([1] * 32, "max_length is 32"), ([1, VOCABULARY], "from 0 to 60"), ([-1], "from 0")]
    async with serving(max_length=32) as engine:
        for tokens, message in refused:
            with pytest.raises(EngineError, match=message):
                await engine.generate(np.array(tokens, np.int32), LONG, (), "s")
        first = asyncio.create_task(sample(engine, 20))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="'s' is generating already"):
            await sample(engine, 20)
        assert len((await first).tokens) == 20


async def test_nothing_is_generated_before_the_first_weights_which_may_come_in_a_folder(tmp_path: Path) -> None:
    model = tiny_model(seed=5)
    folder = read_folder(write_folder(tmp_path, 2, parameters(model), model.config.save_pretrained), 2)
    async with serving(initial_version=-1) as engine:
        assert engine.version == -1
        call = asyncio.create_task(sample(engine, 6))
        waiter = asyncio.create_task(engine.wait_for_version(3))
        await engine.update_weights(2, folder)
        got = await call
        assert set(got.versions) == {2}
        assert_exact({2: model}, START, got, 1.0)
        assert not waiter.done()
        await engine.update_weights(4, parameters(model))
        await waiter
        await engine.wait_for_version(4)


async def test_a_weight_update_that_does_not_fit_changes_nothing() -> None:
    good = parameters(tiny_model(seed=1))
    name = next(iter(good))
    bad = {
        "missing": {n: t for n, t in good.items() if n != name},
        "unknown": {**good, "lm_head.weight": good[name]},
        "came as torch.float32": {**good, name: good[name][:-1]},
        "came as torch.int64": {**good, name: good[name].long()},
    }
    async with serving(initial_version=5) as engine:
        assert engine.expected == {n: tuple(t.shape) for n, t in good.items()}
        for reason, tensors in bad.items():
            with pytest.raises(WeightsError, match=reason):
                await engine.update_weights(6, tensors)
        for version in (5, 3, -1):
            with pytest.raises(WeightsError, match="not newer than 5"):
                await engine.update_weights(version, good)
        assert engine.version == 5
        assert_exact({5: tiny_model()}, START, await sample(engine, 9), 1.0)


@BOTH
async def test_a_failing_pass_fails_its_requests_and_the_engine_goes_on(static: bool) -> None:
    model, broken = tiny_model(), list[bool]()

    def fail_when_broken(*_: Any) -> None:
        if broken:
            raise RuntimeError("out of memory")

    model.register_forward_pre_hook(fail_when_broken)
    async with serving(model, static=static) as engine:
        calls = [asyncio.create_task(sample(engine, 400, f"s{i}")) for i in range(3)]
        await async_until(lambda: engine.stats().running == 3)
        broken.append(True)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in results] == [EngineError] * 3
        assert all("out of memory" in str(each) for each in results)
        broken.clear()
        assert_exact({0: tiny_model()}, START, await sample(engine, 9, "s0"), 1.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_unexpected_error_during_a_weight_update_fails_the_update_and_closes_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    async with serving() as engine:
        monkeypatch.setattr(OwnWeights, "load", fail)
        waiting = asyncio.create_task(engine.wait_for_version(1))
        with pytest.raises(EngineError, match="out of memory"):
            await asyncio.wait_for(engine.update_weights(1, parameters(tiny_model(seed=1))), GENEROUS_S)
        with pytest.raises(EngineError, match="closed"):
            await waiting
        with pytest.raises(EngineError, match="closed"):
            await sample(engine, 1)


@BOTH
async def test_weights_that_give_no_finite_logits_fail_requests_and_leave_no_trace_in_the_cache(static: bool) -> None:
    rotten = {name: torch.full_like(tensor, torch.nan) for name, tensor in parameters(tiny_model()).items()}
    long, short = prompt(np.random.default_rng(0), 40), prompt(np.random.default_rng(1), 10)
    async with serving(static=static) as engine:
        await engine.update_weights(1, rotten)
        for name in ("a", "b"):
            with pytest.raises(EngineError, match="version 1 gives logits that are not finite"):
                await engine.generate(long, LONG, (), name)
        await engine.update_weights(2, parameters(tiny_model()))
        # The shorter one takes the spoilt slot, and because of the longer one attention passes over all of it.
        calls = (engine.generate(start, Sampling(1.0, 9), (), name) for name, start in (("a", short), ("b", long)))
        for start, got in zip((short, long), await asyncio.gather(*calls), strict=True):
            assert_exact({2: tiny_model()}, start, got, 1.0)


@BOTH
async def test_closing_fails_outstanding_calls_and_refuses_later_ones(static: bool) -> None:
    async with serving(slots=2, static=static) as engine:
        calls = [asyncio.create_task(sample(engine, 400, f"s{i}")) for i in range(3)]
        waiting = asyncio.create_task(engine.wait_for_version(1))
        await async_until(lambda: engine.stats().tokens > 0)
        await engine.close()
        results = await asyncio.gather(*calls, waiting, return_exceptions=True)
        assert [type(each) for each in results] == [EngineError] * 4
        with pytest.raises(EngineError, match="closed"):
            await sample(engine, 400)
        engine.release("s")


async def test_stats_count_tokens_and_the_time_without_requests() -> None:
    now = [100.0]
    async with serving(clock=lambda: now[0]) as engine:
        now[0] = 103.0
        assert [len((await sample(engine, count)).tokens) for count in (3, 4)] == [3, 4]
        stats = engine.stats()
        assert (stats.tokens, stats.running, stats.seconds, stats.idle_seconds) == (7, 0, 3.0, 3.0)
        call = asyncio.create_task(sample(engine, 400))
        await async_until(lambda: engine.stats().running == 1)
        now[0] = 110.0
        assert engine.stats().idle_seconds == 3.0
        engine.release("s")
        await call
        assert (engine.stats().seconds, engine.stats().idle_seconds) == (10.0, 3.0)


HEADLESS = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: tiny_model(family="qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=0),
            "sliding window of 64",
        ),
        (
            lambda: tiny_model(family="qwen2", max_position_embeddings=100),
            "engine.max_length is 256, the model has 100",
        ),
        (
            lambda: tiny_model(
                family="qwen2", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "longrope or dynamic",
        ),
        (lambda: AutoModelForCausalLM.from_config(RwkvConfig(**HEADLESS)), "names no attention heads, .*; use another"),
        (
            lambda: AutoModelForCausalLM.from_config(MambaConfig(**HEADLESS)),
            "names no attention heads, .*; use another",
        ),
    ],
)
def test_a_model_whose_attention_does_not_fit_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddedEngine(model(), EngineConfig(slots=2, max_length=256))


async def test_a_model_is_loaded_from_its_folder(tmp_path: Path) -> None:
    tiny_model(seed=2).save_pretrained(tmp_path)
    config = EngineConfig(slots=2, max_length=64)
    engine = EmbeddedEngine.load(ModelConfig(str(tmp_path)), config, device="cpu", initial_version=3)
    assert_exact({3: tiny_model(seed=2)}, START, await sample(engine, 9), 1.0)
    await engine.close()
