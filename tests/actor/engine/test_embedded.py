"""The engine against plain forward passes, whatever joins, leaves, switches or fails in the meantime."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MambaConfig, RwkvConfig

from asyncrl.actor.engine.base import Generation
from asyncrl.actor.engine.embedded import EmbeddedEngine
from asyncrl.config.schema import EngineConfig
from asyncrl.errors import ConfigError, EngineError, WeightsError
from asyncrl.types import Sampling
from asyncrl.weights.folders import read_folder, write_folder
from tests.actor.engine.support import (
    VOCABULARY,
    assert_exact,
    parameters,
    plain_logprobs,
    prompt,
    tiny_model,
)
from tests.helpers import GENEROUS_S, OWN_RUN, async_until

LONG = Sampling(1.0, 400)


def serve(
    scenario: Callable[[EmbeddedEngine], Awaitable[Any]], *, slots: int = 4, max_length: int = 500, **options: Any
) -> Any:
    """Run `scenario` with an engine that serves version 0 of the tiny model unless told otherwise."""

    async def main() -> Any:
        model = options.pop("model", None) or tiny_model()
        engine = EmbeddedEngine(
            model, EngineConfig(slots=slots, max_length=max_length), **{"initial_version": 0, **options}
        )
        try:
            return await asyncio.wait_for(scenario(engine), GENEROUS_S)
        finally:
            await engine.close()

    return asyncio.run(main())


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_logprobs_equal_a_plain_forward_at_every_temperature_with_more_requests_than_slots(family):
    rng = np.random.default_rng(0)
    temperatures = [0.0, 0.5, 1.0, 1.7] * 4
    prompts = [prompt(rng, int(length)) for length in rng.integers(1, 40, 16)]

    async def scenario(engine: EmbeddedEngine) -> list[Generation]:
        calls = [
            engine.generate(start, Sampling(temperature, 5 + i), (), f"s{i}")
            for i, (start, temperature) in enumerate(zip(prompts, temperatures, strict=True))
        ]
        return await asyncio.gather(*calls)

    got = serve(scenario, model=tiny_model(family=family), prefill_tokens=11)
    for i, (start, generation, temperature) in enumerate(zip(prompts, got, temperatures, strict=True)):
        assert len(generation.tokens) == 5 + i
        assert_exact({0: tiny_model(family=family)}, start, generation, temperature)


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
)
def test_logprobs_are_exact_through_joins_turns_aborts_and_weight_switches(episodes, switches, slots, prefill_tokens):
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

    async def scenario(engine: EmbeddedEngine) -> None:
        await asyncio.gather(switch(engine), *(episode(engine, i, *each) for i, each in enumerate(episodes)))
        await async_until(lambda: engine.stats().running == 0)

    serve(scenario, model=tiny_model(seed=0), slots=slots, prefill_tokens=prefill_tokens)


def test_a_generation_in_flight_goes_on_under_new_weights_with_the_version_of_every_token():
    models = {version: tiny_model(seed=version) for version in (0, 4, 9)}
    start = prompt(np.random.default_rng(0), 20)

    async def scenario(engine: EmbeddedEngine) -> Generation:
        call = asyncio.create_task(engine.generate(start, LONG, (), "s"))
        for version in (4, 9):
            tokens = engine.stats().tokens
            await async_until(lambda reached=tokens + 5: engine.stats().tokens >= reached)
            await engine.update_weights(version, parameters(models[version]))
            assert engine.version == version
        return await call

    got = serve(scenario)
    assert sorted(set(got.versions.tolist())) == [0, 4, 9]
    assert (np.diff(got.versions) >= 0).all()
    assert len(got.tokens) == 400
    assert_exact(models, start, got, 1.0)


def test_a_turn_after_a_weight_switch_uses_no_key_of_the_older_version():
    start = prompt(np.random.default_rng(0), 20)
    newer = tiny_model(seed=1)

    async def scenario(engine: EmbeddedEngine) -> tuple[Generation, Generation]:
        first = await engine.generate(start, Sampling(1.0, 5), (), "s")
        await engine.update_weights(1, parameters(newer))
        longer = np.concatenate([start, first.tokens])
        return first, await engine.generate(longer, Sampling(1.0, 30), (), "s")

    first, second = serve(scenario)
    assert set(second.versions) == {1}
    assert_exact({1: newer}, np.concatenate([start, first.tokens]), second, 1.0)


def test_a_second_turn_computes_only_its_suffix():
    model, computed = tiny_model(), []

    async def scenario(engine: EmbeddedEngine) -> None:
        model.register_forward_pre_hook(
            lambda _, __, kwargs: computed.append(kwargs["position_ids"].numel()), with_kwargs=True
        )
        start = prompt(np.random.default_rng(0), 50)
        first = await engine.generate(start, Sampling(1.0, 3), (), "s")
        longer = np.concatenate([start, first.tokens, start[:4]])
        await engine.generate(longer, Sampling(1.0, 2), (), "s")

    serve(scenario, model=model, max_length=100)
    # The last token of a turn has not been computed when the turn ends.
    assert computed == [50, 1, 1, 5, 1]


def test_what_is_sampled_depends_on_seed_and_session_and_not_on_the_batch():
    rng = np.random.default_rng(0)
    prompts = [prompt(rng, 5 + 3 * i) for i in range(9)]
    settings_of = [Sampling(0.0 if i % 2 else 1.0, 30) for i in range(9)]

    async def together(engine: EmbeddedEngine) -> list[Generation]:
        calls = (engine.generate(p, s, (), f"s{i}") for i, (p, s) in enumerate(zip(prompts, settings_of, strict=True)))
        return await asyncio.gather(*calls)

    async def alone(engine: EmbeddedEngine) -> list[Generation]:
        pairs = enumerate(zip(prompts, settings_of, strict=True))
        return [await engine.generate(p, s, (), f"s{i}") for i, (p, s) in pairs]

    def tokens(got: list[Generation]) -> list[list[int]]:
        return [each.tokens.tolist() for each in got]

    reference = tokens(serve(together, seed=3))
    assert tokens(serve(alone, seed=3)) == reference
    other = tokens(serve(alone, seed=4))
    assert [a == b for a, b in zip(other, reference, strict=True)] == [s.temperature == 0 for s in settings_of]


def test_greedy_takes_the_likeliest_token_and_reports_temperature_one():
    model = tiny_model()
    start = prompt(np.random.default_rng(0), 12)
    got = serve(lambda engine: engine.generate(start, Sampling(0.0, 20), (), "s"))
    whole = np.concatenate([start, got.tokens])
    with torch.no_grad():
        best = model(torch.from_numpy(whole).long()[None]).logits[0].argmax(-1).numpy()
    assert got.tokens.tolist() == best[len(start) - 1 : -1].tolist()
    np.testing.assert_allclose(got.logprobs, plain_logprobs(model, whole, 1.0)[len(start) - 1 :], atol=1e-4)


def test_a_turn_ends_with_its_stop_token_or_its_limit_or_a_full_slot():
    start = prompt(np.random.default_rng(0), 10)

    async def scenario(engine: EmbeddedEngine) -> list[Generation]:
        free = await engine.generate(start, Sampling(0.0, 8), (), "s")
        stop = int(free.tokens[3])
        return [
            free,
            await engine.generate(start, Sampling(0.0, 8), [VOCABULARY + 5, stop], "s"),
            await engine.generate(start, LONG, (), "s"),
        ]

    free, stopped, full = serve(scenario, max_length=32)
    assert (free.finish_reason, len(free.tokens)) == ("length", 8)
    first = free.tokens.tolist().index(free.tokens[3]) + 1
    assert (stopped.finish_reason, stopped.tokens.tolist()) == ("stop", free.tokens[:first].tolist())
    assert (full.finish_reason, len(full.tokens)) == ("length", 22)
    assert (free.tokens.dtype, free.logprobs.dtype, free.versions.dtype) == (np.int32, np.float32, np.int32)


def test_a_released_session_returns_what_there_is_and_frees_its_slot():
    start = prompt(np.random.default_rng(0), 10)

    async def scenario(engine: EmbeddedEngine) -> None:
        calls = [asyncio.create_task(engine.generate(start, LONG, (), name)) for name in ("running", "waiting")]
        await async_until(lambda: engine.stats().tokens >= 5)
        engine.release("waiting")
        assert (await calls[1]).finish_reason == "abort"
        engine.release("running")
        got = await calls[0]
        assert got.finish_reason == "abort"
        assert 5 <= len(got.tokens) < 400
        assert_exact({0: tiny_model()}, start, got, 1.0)
        assert engine.stats().running == 0
        engine.release("never heard of")
        assert len((await engine.generate(start, Sampling(1.0, 3), (), "running")).tokens) == 3

    serve(scenario, slots=1)


def test_a_cancelled_caller_frees_its_slot():
    start = prompt(np.random.default_rng(0), 10)

    async def scenario(engine: EmbeddedEngine) -> None:
        call = asyncio.create_task(engine.generate(start, LONG, (), "s"))
        await async_until(lambda: engine.stats().tokens >= 2)
        call.cancel()
        await asyncio.wait([call])
        assert len((await engine.generate(start, Sampling(1.0, 3), (), "s")).tokens) == 3

    serve(scenario, slots=1)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "at least 1"), ([1] * 32, "max_length is 32"), ([1, VOCABULARY], "from 0 to 60"), ([-1], "from 0 to 60")],
)
def test_tokens_that_do_not_fit_are_refused(tokens, message):
    with pytest.raises(EngineError, match=message):
        serve(lambda engine: engine.generate(np.array(tokens, np.int32), LONG, (), "s"), max_length=32)


def test_a_session_generates_one_turn_at_a_time():
    start = prompt(np.random.default_rng(0), 4)

    async def scenario(engine: EmbeddedEngine) -> None:
        first = asyncio.create_task(engine.generate(start, Sampling(1.0, 50), (), "s"))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="'s' is generating already"):
            await engine.generate(start, LONG, (), "s")
        assert len((await first).tokens) == 50

    serve(scenario)


def test_nothing_is_generated_before_the_first_weights():
    start, model = prompt(np.random.default_rng(0), 4), tiny_model(seed=5)

    async def scenario(engine: EmbeddedEngine) -> None:
        assert engine.version == -1
        call = asyncio.create_task(engine.generate(start, Sampling(1.0, 6), (), "s"))
        waiter = asyncio.create_task(engine.wait_for_version(3))
        await engine.update_weights(2, parameters(model))
        got = await call
        assert set(got.versions) == {2}
        assert_exact({2: model}, start, got, 1.0)
        assert not waiter.done()
        await engine.update_weights(4, parameters(model))
        await waiter
        await engine.wait_for_version(4)

    serve(scenario, initial_version=-1)


def test_weights_in_a_folder_are_read_by_the_engine_itself(tmp_path):
    start, model = prompt(np.random.default_rng(0), 4), tiny_model(seed=5)
    folder = read_folder(write_folder(tmp_path, 2, parameters(model), model.config.save_pretrained, OWN_RUN), 2)

    async def scenario(engine: EmbeddedEngine) -> None:
        await engine.update_weights(2, folder)
        assert_exact({2: model}, start, await engine.generate(start, Sampling(1.0, 6), (), "s"), 1.0)

    serve(scenario)


def test_a_weight_update_that_does_not_fit_changes_nothing():
    good = parameters(tiny_model(seed=1))
    name = next(iter(good))
    bad = {
        "missing": {n: t for n, t in good.items() if n != name},
        "unknown": {**good, "lm_head.weight": good[name]},
        "came as torch.float32": {**good, name: good[name][:-1]},
        "came as torch.int64": {**good, name: good[name].long()},
    }

    async def scenario(engine: EmbeddedEngine) -> None:
        assert engine.expected == {n: tuple(t.shape) for n, t in good.items()}
        for reason, tensors in bad.items():
            with pytest.raises(WeightsError, match=reason):
                await engine.update_weights(6, tensors)
        for version in (5, 3, -1):
            with pytest.raises(WeightsError, match="not newer than 5"):
                await engine.update_weights(version, good)
        assert engine.version == 5
        start = prompt(np.random.default_rng(0), 4)
        assert_exact({5: tiny_model()}, start, await engine.generate(start, Sampling(1.0, 9), (), "s"), 1.0)

    serve(scenario, initial_version=5)


def test_a_failing_pass_fails_its_requests_and_the_engine_goes_on():
    model, broken = tiny_model(), []

    def fail_when_told(*_: Any) -> None:
        if broken:
            raise RuntimeError("out of memory")

    model.register_forward_pre_hook(fail_when_told)
    start = prompt(np.random.default_rng(0), 4)

    async def scenario(engine: EmbeddedEngine) -> None:
        calls = [asyncio.create_task(engine.generate(start, LONG, (), f"s{i}")) for i in range(3)]
        await async_until(lambda: engine.stats().running == 3)
        broken.append(True)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in results] == [EngineError] * 3
        assert all("out of memory" in str(each) for each in results)
        broken.clear()
        assert_exact({0: tiny_model()}, start, await engine.generate(start, Sampling(1.0, 9), (), "s0"), 1.0)

    serve(scenario, model=model)


def test_weights_that_give_no_finite_logits_fail_requests_and_leave_no_trace_in_the_cache():
    rotten = {name: torch.full_like(tensor, torch.nan) for name, tensor in parameters(tiny_model()).items()}
    long, short = prompt(np.random.default_rng(0), 40), prompt(np.random.default_rng(1), 10)

    async def scenario(engine: EmbeddedEngine) -> None:
        await engine.update_weights(1, rotten)
        for name in ("a", "b"):
            with pytest.raises(EngineError, match="version 1 gives logits that are not finite"):
                await engine.generate(long, LONG, (), name)
        await engine.update_weights(2, parameters(tiny_model()))
        # The shorter takes the spoilt slot, and because of the longer one attention passes over all of it.
        calls = (engine.generate(start, Sampling(1.0, 9), (), name) for name, start in (("a", short), ("b", long)))
        for start, got in zip((short, long), await asyncio.gather(*calls), strict=True):
            assert_exact({2: tiny_model()}, start, got, 1.0)

    serve(scenario)


def test_closing_fails_what_is_outstanding_and_refuses_what_comes_later():
    start = prompt(np.random.default_rng(0), 4)

    async def scenario(engine: EmbeddedEngine) -> None:
        calls = [asyncio.create_task(engine.generate(start, LONG, (), f"s{i}")) for i in range(3)]
        calls.append(asyncio.create_task(engine.wait_for_version(1)))
        await async_until(lambda: engine.stats().tokens > 0)
        await engine.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in results] == [EngineError] * 4
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(start, LONG, (), "s")
        engine.release("s")

    serve(scenario, slots=2)


def test_stats_count_tokens_and_the_time_without_requests():
    now = [100.0]

    async def scenario(engine: EmbeddedEngine) -> None:
        start = prompt(np.random.default_rng(0), 4)
        now[0] = 103.0
        got = [await engine.generate(start, Sampling(1.0, n), (), "s") for n in (3, 4)]
        stats = engine.stats()
        assert stats.tokens == sum(len(each.tokens) for each in got) == 7
        assert (stats.running, stats.seconds, stats.idle_seconds) == (0, 3.0, 3.0)
        call = asyncio.create_task(engine.generate(start, LONG, (), "s"))
        await async_until(lambda: engine.stats().running == 1)
        now[0] = 110.0
        assert engine.stats().idle_seconds == 3.0
        engine.release("s")
        await call
        assert engine.stats().seconds == 10.0
        assert engine.stats().idle_seconds == 3.0

    serve(scenario, clock=lambda: now[0])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "sliding window of 64"),
        ({"max_position_embeddings": 100}, "engine.max_length is 256, the model has 100"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "longrope or dynamic"),
    ],
)
def test_a_model_whose_attention_does_not_fit_is_refused(extra, message):
    with pytest.raises(ConfigError, match=message):
        EmbeddedEngine(tiny_model(family="qwen2", **extra), EngineConfig(slots=2, max_length=256))


@pytest.mark.parametrize("family", [RwkvConfig, MambaConfig])
def test_a_model_without_attention_heads_is_refused(family):
    model = AutoModelForCausalLM.from_config(family(vocab_size=61, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(ConfigError, match=r"names no attention heads, .*; use another engine"):
        EmbeddedEngine(model, EngineConfig(slots=2, max_length=64))


def test_a_model_is_loaded_from_its_folder(tmp_path):
    tiny_model(seed=2).save_pretrained(tmp_path)
    start = prompt(np.random.default_rng(0), 9)

    async def main() -> Generation:
        config = EngineConfig(slots=2, max_length=64)
        engine = EmbeddedEngine.load(str(tmp_path), config, device="cpu", initial_version=3)
        got = await engine.generate(start, Sampling(1.0, 9), (), "s")
        await engine.close()
        return got

    assert_exact({3: tiny_model(seed=2)}, start, asyncio.run(main()), 1.0)
