"""An engine that computes otherwise than the learner: what it records is what it sampled from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import EngineConfig, ModelConfig, TrainConfig
from asyncrl.engine.base import Generation
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.from_config import open_engine
from asyncrl.types import Sampling
from tests.engine.support import assert_exact, canary_check, parameters, plain_logprobs, tiny_model
from tests.engine.test_embedded import START, sample, serving
from tests.helpers import async_until
from tests.mixtures import mixture

pytestmark = pytest.mark.slow

COUNT = 60
FIELDS = ("tokens", "logprobs", "versions")


def differences(model: Any, got: Generation) -> NDArray[np.float32]:
    """Between the recorded log-probs and those of a plain forward pass of `model`."""
    whole = np.concatenate([START, got.tokens])
    return np.abs(got.logprobs - plain_logprobs(model, whole, 1.0)[len(START) - 1 :])


async def loaded(folder: Path, dtype: str, model: Any) -> Generation:
    """The samples of an engine of this dtype that got the float32 `model` as an update, with its canary."""
    tiny_model().save_pretrained(folder)
    config = EngineConfig(slots=2, max_length=100, dtype=dtype)
    engine = EmbeddedEngine.load(ModelConfig(str(folder)), config, device="cpu")
    try:
        await engine.update_weights(0, parameters(model), canary_check(model, 0))
        return await sample(engine, COUNT)
    finally:
        await engine.close()


async def test_an_engine_in_bfloat16_records_the_log_probs_of_bfloat16(tmp_path: Path) -> None:
    got = await loaded(tmp_path, "bfloat16", tiny_model(1))
    tiny_model(1).save_pretrained(tmp_path)
    in_bfloat16 = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert differences(in_bfloat16, got).mean() < 0.5 * differences(tiny_model(1), got).mean()


def rounded(model: Any, largest: int) -> Any:
    """The model with the matrices of its layers rounded row by row, but for routers."""
    with torch.no_grad():
        for name, matrix in model.named_parameters():
            if "_proj" in name:
                for row in matrix.view(-1, matrix.shape[-1]):
                    step = row.abs().max() / largest
                    row.copy_((row / step).round() * step)
    return model


async def test_an_engine_in_int8_records_the_log_probs_of_rounded_matrices(tmp_path: Path) -> None:
    got = await loaded(tmp_path, "int8", tiny_model(1))
    assert_exact({0: rounded(tiny_model(1), 127)}, START, got, 1.0)
    assert differences(tiny_model(1), got).max() > 1e-2


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("make", [tiny_model, lambda: mixture("qwen3_moe", 0)], ids=["dense", "mixture"])
async def test_the_matrices_that_an_engine_begins_with_are_rounded_too(
    make: Callable[[], Any], dtype: str, largest: int
) -> None:
    engine = EmbeddedEngine(make(), EngineConfig(slots=2, max_length=100, dtype=dtype), initial_version=0)
    try:
        assert_exact({0: rounded(make(), largest)}, START, await sample(engine, COUNT), 1.0)
    finally:
        await engine.close()


def kept_logprobs(old: Any, new: Any, got: Generation) -> NDArray[np.float32]:
    """The log-probs of what was sampled, where `new` takes over with the keys and values of `old`."""
    of_old = int((got.versions == 0).sum())
    computed = len(START) + of_old - 1
    ids = torch.tensor(np.concatenate([START, got.tokens]), dtype=torch.long)[None]
    with torch.no_grad():
        before = old(ids[:, :computed], use_cache=True)
        after = new(ids[:, computed:], past_key_values=before.past_key_values, use_cache=True)
    logprobs = torch.cat([before.logits, after.logits], 1)[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[len(START) - 1 :, 0].numpy()


async def test_where_the_cache_is_kept_a_sequence_goes_on_with_keys_of_the_older_version() -> None:
    """The canary of the update needs none of its slots, all of which are in use."""
    models = [tiny_model(), tiny_model(1)]
    async with serving(slots=1, keep_cache=True) as engine:
        call = asyncio.create_task(sample(engine, 300))
        await async_until(lambda: engine.stats().tokens > 5)
        await engine.update_weights(1, parameters(models[1]), canary_check(models[1], 1))
        got = await call
    assert set(got.versions) == {0, 1}
    np.testing.assert_allclose(got.logprobs, kept_logprobs(*models, got), atol=1e-4)
    assert differences(models[1], got)[got.versions == 1].max() > 1e-2


async def test_in_place_a_later_turn_goes_on_with_its_keys_and_no_other_session_uses_them(tmp_path: Path) -> None:
    models = [tiny_model(), tiny_model(1)]
    models[0].save_pretrained(tmp_path)
    config = TrainConfig(model=ModelConfig(str(tmp_path)), engine=EngineConfig(slots=2, max_length=100))
    config.weights.mode = "in_place"
    engine = open_engine(config).engine
    try:
        await engine.update_weights(0, parameters(models[0]))
        first = await engine.generate(START, Sampling(1.0, 20), (), "s")
        await engine.update_weights(1, parameters(models[1]))
        begun = np.concatenate([START, first.tokens])
        second = await engine.generate(begun, Sampling(1.0, 20), (), "s")
        other = await engine.generate(begun, Sampling(1.0, 20), (), "other")
        third = await engine.generate(np.concatenate([begun, second.tokens]), Sampling(1.0, 20), (), "s")
    finally:
        await engine.close()
    turns = [first, second, third]
    whole = Generation(*(np.concatenate([getattr(each, name) for each in turns]) for name in FIELDS), "length")
    np.testing.assert_allclose(whole.logprobs, kept_logprobs(*models, whole), atol=1e-4)
    assert_exact({1: models[1]}, begun, other, 1.0)
