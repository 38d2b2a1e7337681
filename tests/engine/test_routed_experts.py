"""Experts of tokens from the embedded engine, and how episodes keep them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import EngineConfig
from asyncrl.engine.base import Generation
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.router_watch import RouterWatch
from asyncrl.episode.branches import Branch
from asyncrl.errors import ConfigError
from asyncrl.modelling.routing import RoutedTokens, routing_shape
from asyncrl.types import Role, Sampling
from tests.engine.support import parameters, prompt, tiny_model
from tests.mixtures import mixture

FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "glm4_moe"]
SIZES = {"vocab_size": 61, "num_hidden_layers": 3}


def own_experts(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Rows of what a plain forward pass chooses."""
    watch = RouterWatch(model)
    with torch.no_grad():
        model(torch.from_numpy(tokens).long()[None], use_cache=False)
    return np.stack(watch.take())


def whole(given: np.ndarray, got: Generation) -> tuple[np.ndarray, np.ndarray]:
    """The sequence of a turn, and the rows of its experts."""
    (routing,) = got.routing
    assert routing.start == 0
    return np.concatenate([given, got.tokens]), routing.rows


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_turns_have_the_experts_of_a_plain_forward_pass(family: str) -> None:
    """The case has more requests than slots, prompts in chunks, and sessions that share prefixes and go on."""
    config = EngineConfig(slots=3, max_length=200, return_routed_experts=True)
    engine = EmbeddedEngine(mixture(family, **SIZES), config, initial_version=0, prefill_tokens=7)
    model, rng = mixture(family, **SIZES), np.random.default_rng(0)
    common = prompt(rng, 20)

    async def episode(index: int) -> None:
        tokens = np.concatenate([common[: 20 - 3 * (index % 3)], prompt(rng, index)])
        for turn in range(2):
            got = await engine.generate(tokens, Sampling(1.0, 6), (), f"s{index}")
            tokens, rows = whole(tokens, got)
            np.testing.assert_array_equal(rows, own_experts(model, tokens)[:-1])
            tokens = np.concatenate([tokens, prompt(rng, 3 + turn)])

    try:
        await asyncio.gather(*(episode(index) for index in range(6)))
    finally:
        await engine.close()


@pytest.mark.slow
async def test_tokens_that_new_weights_compute_again_keep_the_experts_that_sampled_with_them() -> None:
    config = EngineConfig(slots=2, max_length=400, return_routed_experts=True)
    models = [mixture("qwen3_moe", seed, **SIZES) for seed in range(2)]
    engine = EmbeddedEngine(mixture("qwen3_moe", 0, **SIZES), config, initial_version=0)
    start = prompt(np.random.default_rng(0), 10)
    try:
        call = asyncio.create_task(engine.generate(start, Sampling(1.0, 300), (), "s"))
        while engine.stats().tokens < 20:
            await asyncio.sleep(0)
        await engine.update_weights(1, parameters(models[1]))
        got = await call
    finally:
        await engine.close()
    tokens, rows = whole(start, got)
    # The token that version 1 samples first comes from a pass over the last one of version 0.
    switch = len(start) + int((got.versions == 0).sum()) - 1
    assert len(start) + 10 < switch < len(tokens) - 10
    for version, part in enumerate((slice(0, switch), slice(switch, len(tokens) - 1))):
        np.testing.assert_array_equal(rows[part], own_experts(models[version], tokens)[part])


def test_a_dense_model_has_no_experts_to_return() -> None:
    with pytest.raises(ConfigError, match="qwen3 model cannot be replayed"):
        EmbeddedEngine(tiny_model(), EngineConfig(slots=1, max_length=8, return_routed_experts=True))


SHAPE = routing_shape(mixture("qwen3_moe").config)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8))
def test_a_token_keeps_the_experts_that_came_first_and_has_none_where_none_came(spans: list[tuple[int, int]]) -> None:
    branch, count = Branch("s", 40), 20
    branch.add(np.zeros(count, np.int32), Role.PROMPT)
    expected = np.full(count, 255)
    for number, (start, end) in enumerate(spans):
        rows = np.full((max(0, end - start), SHAPE.width), number, np.uint8)
        branch.note_experts([RoutedTokens(start, rows)])
        part = expected[start:end] if start < end else expected[:0]
        part[part == 255] = number
    found = branch.experts(count)
    assert (found is None) == (not spans)
    if found is not None:
        np.testing.assert_array_equal(found, np.repeat(expected[:, None], SHAPE.width, 1))


def test_tokens_that_take_the_place_of_others_have_no_experts_yet() -> None:
    branch = Branch("s", 10)
    branch.add(np.zeros(4, np.int32), Role.PROMPT)
    branch.note_experts([RoutedTokens(0, SHAPE.missing(4) - 1)])
    branch.turns = []
    branch.add(np.zeros(3, np.int32), Role.PROMPT)
    found = branch.experts(3)
    assert found is not None
    assert (found == 255).all()
