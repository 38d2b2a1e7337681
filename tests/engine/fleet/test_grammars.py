"""A turn under a grammar is one request, and what the grammar left of the policy's probability is measured."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from asyncrl.engine.base import Generation, PlacedImage
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.errors import EngineError
from asyncrl.types import Grammar, Sampling
from tests.engine.fleet.fakes import FakeSglang, canary_logprobs, counter, fleet_with, ids, sample, tensors
from tests.helpers import async_until

REGEX = Grammar("regex", "[ab]+")


async def under_grammar(fleet: Fleet, count: int = 5, temperature: float = 1.0) -> Generation:
    return await fleet.generate(ids(), Sampling(temperature, count, REGEX), (), "s")


def expected_mass(got: Generation) -> np.ndarray:
    """exp(log pi - log mu), where the fake server gives a token the log-prob -weights when it samples it."""
    version = int(got.versions[0])
    policy = canary_logprobs([*ids().tolist(), *got.tokens.tolist()], version)[-len(got.tokens) :]
    return np.exp(np.array(policy) + version).astype(np.float32)


async def test_a_turn_is_asked_for_whole_with_its_grammar_and_measured_at_each_token() -> None:
    server = FakeSglang()
    async with fleet_with(5, server, settings={"segment_tokens": 2}) as fleet:
        got = await under_grammar(fleet)
        free = await sample(fleet)
        counts = [counter(fleet, name) for name in ("grammar_tokens", "grammar_tokens_unmeasured", "grammar_restarts")]
    assert server.limits == [5, 2, 2, 1]
    assert server.grammars == [{"regex": "[ab]+"}, {}, {}, {}]
    np.testing.assert_allclose(got.grammar_mass, expected_mass(got))
    assert free.grammar_mass is None
    assert counts == [5, 0, 0]


async def test_the_measure_of_a_turn_behind_images_shows_them_too() -> None:
    server = FakeSglang()
    asked: list[Any] = []
    own = server._generate

    async def generate(body: Any) -> Any:
        asked.append(body)
        return await own(body)

    server.answers["generate"] = generate
    tokens, placed = np.array([1, 7, 7, 7, 2], np.int32), [PlacedImage(1, 4, b"", b"a file")]
    async with fleet_with(5, server) as fleet:
        await fleet.generate(tokens, Sampling(1.0, 2, REGEX), (), "s", placed)
    sampled, measured = asked
    assert sampled["input_ids"] == [1, 7, 2]
    assert measured["input_ids"] == [1, 7, 2, 5, 5]
    assert sampled["image_data"] == measured["image_data"] != []
    assert measured["logprob_start_len"] == len(tokens) - 1


async def test_a_turn_that_is_cut_starts_over_since_a_server_would_begin_the_grammar_anew() -> None:
    server = FakeSglang()
    async with fleet_with(5, server) as fleet:
        call = asyncio.create_task(under_grammar(fleet, 300))
        await async_until(lambda: server.running and len(server.running[0].pairs) > 3)
        server.finish(server.running[0], "abort")
        got = await call
        assert counter(fleet, "grammar_restarts") == 1
    assert server.prompts == [ids().tolist()] * 2
    assert len(got.tokens) == 300


async def test_a_turn_that_is_cut_again_and_again_fails_with_the_reason() -> None:
    server = FakeSglang()

    async def abort(body: Any) -> Any:
        meta = {"weight_version": server.label, "output_token_logprobs": [[-1.0, 7, None]]}
        return {"output_ids": [7], "meta_info": {**meta, "finish_reason": {"type": "abort"}}}

    async with fleet_with(5, server, settings={"attempts": 3}) as fleet:
        server.answers["generate"] = abort
        with pytest.raises(EngineError, match=r"3 requests in a row failed.*under a grammar starts over"):
            await under_grammar(fleet)


@pytest.mark.slow
async def test_tokens_of_older_weights_than_those_that_measure_have_no_mass() -> None:
    server = FakeSglang()
    async with fleet_with(5, server, mode="retract") as fleet:
        call = asyncio.create_task(under_grammar(fleet, 300))
        await async_until(lambda: server.running and len(server.running[0].pairs) > 3)
        await fleet.update_weights(6, tensors(6))
        got = await call
        unmeasured = counter(fleet, "grammar_tokens_unmeasured")
    assert set(got.versions) == {5, 6}
    assert got.grammar_mass is not None
    np.testing.assert_array_equal(got.grammar_mass > 0, got.versions == 6)
    assert unmeasured == np.count_nonzero(got.versions == 5) > 0


async def test_without_temperature_1_nothing_is_measured() -> None:
    server = FakeSglang()
    async with fleet_with(5, server) as fleet:
        got = await under_grammar(fleet, temperature=0.7)
        assert counter(fleet, "grammar_tokens_unmeasured") == 5
    assert got.grammar_mass is not None
    assert not got.grammar_mass.any()
    assert server.calls.count("generate") == 1


@pytest.mark.parametrize("fault", ["refused", "weights", "nan"])
async def test_a_turn_whose_measure_fails_or_meets_an_update_is_kept_without_mass(fault: str) -> None:
    server = FakeSglang()
    own = server._generate

    async with fleet_with(5, server) as fleet:

        async def generate(body: Any) -> Any:
            if "logprob_start_len" not in body:
                return await own(body)
            if fault == "refused":
                return web.json_response({"message": "too long"}, status=400)
            if fault == "nan":
                answer = await own(body)
                answer["meta_info"]["input_token_logprobs"][-1][0] = None
                return answer
            pauses = server.calls.count("pause_generation")
            update = asyncio.create_task(fleet.update_weights(6, tensors(6)))
            await async_until(lambda: server.calls.count("pause_generation") > pauses)
            answer = await own(body)
            await update
            return answer

        server.answers["generate"] = generate
        got = await under_grammar(fleet)
    assert got.grammar_mass is not None
    assert got.tokens.tolist() == [5] * 5
    assert np.count_nonzero(got.grammar_mass) == (4 if fault == "nan" else 0)


async def test_a_server_that_is_being_updated_is_not_asked() -> None:
    server, loads = FakeSglang(), asyncio.Event()
    own_generate, own_load = server._generate, server._update_weights_from_disk
    measured: list[Any] = []
    updates: list[asyncio.Task[None]] = []

    async with fleet_with(5, server) as fleet:

        async def generate(body: Any) -> Any:
            if "logprob_start_len" in body:
                measured.append(body)
                return web.Response(status=400)
            answer = await own_generate(body)
            pauses = server.calls.count("pause_generation")
            updates.append(asyncio.create_task(fleet.update_weights(6, tensors(6))))
            await async_until(lambda: server.calls.count("pause_generation") > pauses)
            return answer

        async def load(body: Any) -> Any:
            await loads.wait()
            return await own_load(body)

        server.answers |= {"generate": generate, "update_weights_from_disk": load}
        got = await under_grammar(fleet)
        loads.set()
        await updates[0]
    assert measured == []
    assert got.grammar_mass is not None
    assert not got.grammar_mass.any()
