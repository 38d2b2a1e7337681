"""Static passes in the engine. tests/engine/test_embedded.py runs its own tests with both kinds of passes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import EngineConfig
from asyncrl.engine.base import Generation
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.graphed.inputs import PassRows, PassTokens
from asyncrl.engine.graphed.passes import GraphedPasses
from asyncrl.engine.passes import Passes
from asyncrl.types import Sampling
from asyncrl.weights.canary import CanaryError
from tests.engine.support import assert_exact, canary_check, parameters, prompt, swapped_layers, tiny_model
from tests.engine.test_embedded import START, sample, serving
from tests.helpers import async_until
from tests.mixtures import mixture

pytestmark = pytest.mark.slow


async def episodes(static: bool) -> list[Generation]:
    """Turns of sessions that share a prompt, stop early, want alternatives, and are more than the slots."""
    rng, common = np.random.default_rng(0), prompt(np.random.default_rng(1), 30)

    async def play(engine: EmbeddedEngine, index: int, suffixes: list[Any]) -> list[Generation]:
        tokens, turns = common[: 30 - index], []
        for suffix in suffixes:
            tokens = np.concatenate([tokens, suffix])
            sampling = Sampling([0.0, 0.8, 1.0][index % 3], 12, alternatives=2 * (index % 2))
            turns.append(await engine.generate(tokens, sampling, [7, 8, 9], f"s{index}"))
            tokens = np.concatenate([tokens, turns[-1].tokens])
        return turns

    async with serving(slots=5, prefill_tokens=9, static=static) as engine:
        assert isinstance(engine._passes, GraphedPasses) == static
        suffixes = [[prompt(rng, 1 + index) for _ in range(3)] for index in range(9)]
        played = await asyncio.gather(*(play(engine, index, each) for index, each in enumerate(suffixes)))
        assert engine.stats().tokens == sum(len(turn.tokens) for turns in played for turn in turns)
    return [turn for turns in played for turn in turns]


async def test_both_kinds_of_passes_sample_the_same_tokens() -> None:
    usual, static = await episodes(False), await episodes(True)
    for theirs, ours in zip(usual, static, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.finish_reason == theirs.finish_reason
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        assert (ours.alternatives is None) == (theirs.alternatives is None)
        if ours.alternatives is not None and theirs.alternatives is not None:
            np.testing.assert_array_equal(ours.alternatives.tokens, theirs.alternatives.tokens)
            np.testing.assert_allclose(ours.alternatives.logprobs, theirs.alternatives.logprobs, atol=1e-4)


async def test_the_host_reads_the_tokens_of_a_pass_after_the_next_one_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = list[str]()

    def noted(name: str, call: Any) -> Any:
        return lambda *each: order.append(name) or call(*each)

    async with serving(static=True) as engine:
        monkeypatch.setattr(engine._passes, "_read", noted("read", engine._passes._read))
        monkeypatch.setattr(engine._passes, "_launch", noted("start", engine._passes._launch))
        await sample(engine, 4)
    # There is no fifth pass: the host knows the limit of the request.
    assert order == ["start", "start", "read", "start", "read", "start", "read", "read"]


async def test_new_weights_are_copied_into_the_memory_that_graphs_read_and_a_bad_version_is_copied_back() -> None:
    newer, model = tiny_model(1), tiny_model()
    async with serving(model, static=True) as engine:
        places = {name: each.data_ptr() for name, each in model.named_parameters()}
        call = asyncio.create_task(sample(engine, 200, "long"))
        await async_until(lambda: engine.stats().tokens > 5)
        with pytest.raises(CanaryError, match="differ from the learner's"):
            await engine.update_weights(1, swapped_layers(parameters(newer)), canary_check(newer, 1))
        given = parameters(newer)
        await engine.update_weights(1, given, canary_check(newer, 1))
        for each in given.values():
            each.fill_(torch.nan)
        assert_exact({0: tiny_model(), 1: newer}, START, await call, 1.0)
        assert_exact({1: newer}, START, await sample(engine, 9), 1.0)
        assert places == {name: each.data_ptr() for name, each in model.named_parameters()}


async def test_a_released_request_ends_with_all_tokens_that_were_sampled_for_it() -> None:
    async with serving(static=True) as engine:
        call = asyncio.create_task(sample(engine, 200, "released"))
        await async_until(lambda: engine.stats().tokens > 5)
        engine.release("released")
        got = await call
    assert got.finish_reason == "abort"
    assert len(got.tokens) == engine.stats().tokens
    assert_exact({0: tiny_model()}, START, got, 1.0)


async def test_where_the_cache_is_kept_a_sequence_decodes_on_through_a_switch() -> None:
    async with serving(static=True, keep_cache=True) as engine:
        launched = list[int]()
        call = asyncio.create_task(sample(engine, 300))
        await async_until(lambda: engine.stats().tokens > 5)
        passes: Any = engine._passes
        launch = passes._launch
        passes._launch = lambda tokens, rows: launched.append(tokens.count) or launch(tokens, rows)
        await engine.update_weights(1, parameters(tiny_model(1)), canary_check(tiny_model(1), 1))
        got = await call
    assert set(got.versions) == {0, 1}
    # The canary has 32 tokens. The sequence itself is never computed again.
    assert sorted(set(launched)) == [1, 32]


async def test_a_mixture_of_experts_may_have_static_passes() -> None:
    async with serving(mixture("qwen3_moe", 0), static=True) as engine:
        assert isinstance(engine._passes, GraphedPasses)
        assert_exact({0: mixture("qwen3_moe", 0)}, START, await sample(engine, 20), 1.0)


def waiting_mixture() -> Any:
    """A mixture whose experts are computed one by one, and only those that were chosen."""
    model = mixture("qwen3_moe", 0)
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (waiting_mixture, {}, "the host has to wait for the result of nonzero"),
        (lambda: mixture("qwen3_moe", 0), {"return_routed_experts": True}, "engine.return_routed_experts=true"),
    ],
    ids=["waits", "experts"],
)
def test_a_model_or_option_without_static_passes_is_named_once_and_computed_as_usual(
    model: Any, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = EmbeddedEngine(model(), EngineConfig(slots=2, max_length=50, **options), static=True)
    asyncio.run(engine.close())
    assert isinstance(engine._passes, Passes)
    (line,) = (each.message for each in caplog.records if "without CUDA graphs" in each.message)
    assert reason in line


def test_a_pass_of_any_size_may_have_only_padding_as_when_it_is_recorded() -> None:
    passes, none = GraphedPasses(tiny_model(), 3, 64, prefill_tokens=100), np.zeros(0, np.int64)
    with torch.inference_mode():
        passes._tensors.inputs.fill_(1 << 40)
        for index, each in enumerate(passes._passes):
            passes._fill(index, PassTokens(none, none, [], []), PassRows(none, none, np.zeros(0), np.zeros(0)))
            each.run()
