"""The embedded engine serves no version whose canary it does not repeat, although all checksums are right."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.schema import EngineConfig
from asyncrl.engine import passes
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.errors import WeightsError
from asyncrl.types import Sampling
from asyncrl.weights.canary import Canary, CanaryCheck, CanaryError
from tests.engine.support import (
    assert_exact,
    canary_check,
    parameters,
    prompt,
    swapped_layers,
    tiny_model,
)
from tests.engine.test_embedded import START, sample, serving
from tests.helpers import GENEROUS_S, async_until
from tests.mixtures import mixture

pytestmark = pytest.mark.slow

Tensors = Mapping[str, torch.Tensor]
Spoil = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def one_shuffled(staged: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One projection of the last layer has its own numbers in another order."""
    name = "model.layers.1.mlp.down_proj.weight"
    order = torch.randperm(staged[name].numel(), generator=torch.Generator().manual_seed(0))
    return {**staged, name: staged[name].flatten()[order].view(staged[name].shape)}


def with_old(engine: EmbeddedEngine, part: str) -> Spoil:
    """Keep the engine's old tensors whose name has `part`."""

    def spoil(staged: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        old = engine._weights._tensors
        return {name: old[name].data.clone() if part in name else each for name, each in staged.items()}

    return spoil


def spoil_next(monkeypatch: pytest.MonkeyPatch, engine: EmbeddedEngine, spoil: Spoil) -> None:
    """Spoil the weights within the engine, after all checks of arrived tensors."""
    stage = engine._weights.stage
    monkeypatch.setattr(engine._weights, "stage", lambda tensors: spoil(stage(tensors)))


async def test_versions_that_are_what_they_say_are_served_and_their_difference_is_counted() -> None:
    async with serving(tiny_model(), initial_version=-1) as engine:
        for version in range(3):
            model = tiny_model(version)
            await engine.update_weights(version, parameters(model), canary_check(model, version))
            assert_exact({version: model}, START, await sample(engine, 9, f"s{version}"), 1.0)
            counters = engine.stats().counters
            assert 0 <= counters["canary_difference"] < 1e-4 < counters["canary_allowed"]
        assert engine.stats().counters["canary_failures"] == 0


@pytest.mark.parametrize("fault", ["one tensor", "two layers", "old weights", "not finite"])
async def test_a_version_that_went_wrong_within_the_engine_fails_and_the_one_before_is_served_on(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request in flight goes on meanwhile, and all its tokens are of the version that is recorded for them."""
    newer = tiny_model(1)
    async with serving() as engine:
        spoils: dict[str, Spoil] = {
            "one tensor": one_shuffled,
            "two layers": swapped_layers,
            "old weights": with_old(engine, ""),
            "not finite": lambda staged: {name: torch.full_like(each, torch.nan) for name, each in staged.items()},
        }
        call = asyncio.create_task(engine.generate(START, Sampling(1.0, 100), (), "long"))
        await async_until(lambda: engine.stats().tokens > 5)
        with monkeypatch.context() as patch:
            spoil_next(patch, engine, spoils[fault])
            with pytest.raises(
                CanaryError, match="version 1, received by disk, fails its canary in the embedded engine"
            ):
                await engine.update_weights(1, parameters(newer), canary_check(newer, 1, "disk"))
        assert engine.version == 0
        assert engine.stats().counters["canary_failures"] == 1
        short = await sample(engine, 9, "short")
        assert_exact({0: tiny_model()}, START, short, 1.0)
        await engine.update_weights(1, parameters(newer), canary_check(newer, 1))
        assert_exact({0: tiny_model(), 1: newer}, START, await call, 1.0)
        assert_exact({1: newer}, START, await sample(engine, 9, "later"), 1.0)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
async def test_an_engine_that_rounds_to_integers_repeats_the_canary_and_wrong_weights_fail_it_all_the_same(
    dtype: str,
) -> None:
    """A healthy engine in int4 differs by as much as wrong weights of int8."""
    model, other = tiny_model(num_hidden_layers=8), tiny_model(9, num_hidden_layers=8)
    check = canary_check(model, 0)
    config = EngineConfig(slots=2, max_length=64, dtype=dtype)
    engine = EmbeddedEngine(tiny_model(num_hidden_layers=8), config, initial_version=-1)
    try:
        for wrong in (swapped_layers(parameters(model)), parameters(other)):
            with pytest.raises(CanaryError, match="differ from the learner's"):
                await engine.update_weights(0, wrong, check)
        await engine.update_weights(0, parameters(model), check)
        assert engine.version == 0
    finally:
        await engine.close()


async def test_stale_experts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = mixture("qwen3_moe", 1)
    async with serving(mixture("qwen3_moe", 0)) as engine:
        with monkeypatch.context() as patch:
            spoil_next(patch, engine, with_old(engine, ".experts."))
            with pytest.raises(CanaryError, match="differ from the learner's"):
                await engine.update_weights(1, parameters(newer), canary_check(newer, 1))
        await engine.update_weights(1, parameters(newer), canary_check(newer, 1))
        assert engine.version == 1


async def test_weights_that_the_engine_silently_keeps_are_found_out_though_the_learner_moved_by_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stale weights differ by less than the limit, but the answer has the same bits as before."""
    newer = tiny_model()
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.add_(1e-4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    check, old = canary_check(newer, 2), canary_check(tiny_model(), 1)
    moved = np.abs(np.subtract(check.canary.logprobs, old.canary.logprobs)).mean()
    assert 0.1 * check.allowed("float32") < moved < check.allowed("float32")
    async with serving(initial_version=-1) as engine:
        await engine.update_weights(1, parameters(tiny_model()), old)
        with monkeypatch.context() as patch:
            spoil_next(patch, engine, with_old(engine, ""))
            with pytest.raises(CanaryError, match="equal those of version 1 bit for bit"):
                await engine.update_weights(2, parameters(newer), check)
        await engine.update_weights(2, parameters(newer), check)


async def test_a_slot_that_is_shorter_than_the_canary_is_enough() -> None:
    newer = tiny_model(1)
    async with serving(max_length=12) as engine:
        await engine.update_weights(1, parameters(newer), canary_check(newer, 1))
        with pytest.raises(CanaryError, match="over 11 tokens"):
            await engine.update_weights(2, parameters(tiny_model(2)), canary_check(newer, 2))


async def test_a_canary_that_cannot_be_computed_fails_the_version_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newer = tiny_model(1)
    async with serving() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(passes, "Layout", lambda *_: 1 / 0)
            with pytest.raises(CanaryError, match=r"did not answer the canary .*division by zero"):
                await engine.update_weights(1, parameters(newer), canary_check(newer, 1))
        assert_exact({0: tiny_model()}, START, await sample(engine, 9), 1.0)
        outside = CanaryCheck(1, Canary((1, 61), (-1.0,), "float32"), "zmq")
        with pytest.raises(WeightsError, match="must load the same model"):
            await engine.update_weights(1, parameters(newer), outside)


@pytest.mark.parametrize(("cancelled", "keep_cache"), [(True, False), (False, False), (True, True)])
async def test_what_a_bad_version_left_in_a_half_computed_prompt_spoils_no_later_version(
    cancelled: bool, keep_cache: bool
) -> None:
    """No log-prob has shown what it left there."""
    rotten: Any = {name: torch.full_like(tensor, torch.nan) for name, tensor in parameters(tiny_model()).items()}
    good, model, long = tiny_model(1), tiny_model(), prompt(np.random.default_rng(0), 60)
    reached, go_on, passes = threading.Event(), threading.Event(), iter(range(1000))

    def stop_after_some_passes(*_: Any) -> None:
        if next(passes) == 5:
            reached.set()
            assert go_on.wait(GENEROUS_S)

    async with serving(model, prefill_tokens=8, keep_cache=keep_cache) as engine:
        await engine.update_weights(1, rotten)
        model.register_forward_pre_hook(stop_after_some_passes)
        call = asyncio.create_task(engine.generate(long, Sampling(1.0, 2), (), "half"))
        await async_until(reached.is_set)
        if cancelled:
            call.cancel()
        update = asyncio.create_task(engine.update_weights(2, parameters(good)))
        await async_until(lambda: engine._commands.qsize() == 1 + cancelled)
        go_on.set()
        await update
        # The short one is in the spoilt slot, and because of the long one attention passes over all of it.
        calls = (engine.generate(start, Sampling(1.0, 9), (), name) for name, start in (("a", START), ("b", long)))
        for start, got in zip((START, long), await asyncio.gather(*calls), strict=True):
            assert_exact({2: good}, start, got, 1.0)
        if not cancelled:
            assert_exact({2: good}, long, await call, 1.0)


@pytest.mark.parametrize("static", [False, True])
async def test_the_copies_of_a_refused_update_are_freed_at_once(static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a GPU must not wait for a garbage collection, which an actor seldom makes."""
    copies: list[weakref.ref[torch.Tensor]] = []

    def remembered(staged: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        swapped = {name: each.clone() for name, each in swapped_layers(staged).items()}
        copies.extend(map(weakref.ref, swapped.values()))
        return swapped

    async with serving(tiny_model(1), static=static) as engine:
        spoil_next(monkeypatch, engine, remembered)
        newer = tiny_model(2)
        gc.disable()
        try:
            with pytest.raises(CanaryError):
                await engine.update_weights(1, parameters(newer), canary_check(newer, 1))
            assert copies
            await async_until(lambda: all(each() is None for each in copies))
        finally:
            gc.enable()
