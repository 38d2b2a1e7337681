"""The fleet over real servers: exact log-probs and versions, no matter what is updated, aborted or killed."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import Any

import numpy as np
import pytest

from asyncrl.engine.base import Generation
from asyncrl.engine.sglang.routes import distributed
from asyncrl.types import Sampling
from asyncrl.weights.folders import Weights, read_folder, write_folder
from tests.engine.real import (
    STOP_ID,
    Taken,
    assert_nothing_lost,
    assert_sampled_from,
    assert_whole,
    load,
    policy,
    prompts,
    push_under_load,
    run,
    sample_at_temperatures,
    servers_ready,
    some,
)
from tests.engine.support import assert_exact, parameters
from tests.helpers import async_until
from tests.sglang.support import RealServer, fleet_of

PUSHES = int(os.environ.get("ASYNCRL_SGLANG_PUSHES", "50"))
EPISODES = 32
MODES = ["retract", "abort", "in_place", "drain"]


@pytest.mark.parametrize("way", ["auto", "the learner's folder", "gloo"])
def test_logprobs_are_those_of_the_hugging_face_model_at_every_temperature(server, way, tmp_path):
    weights: Weights = parameters(policy(7))
    into = way
    if way == "the learner's folder":
        into = "auto"
        weights = read_folder(write_folder(tmp_path / "pushed", 7, weights, policy(7).config.save_pretrained), 7)

    async def scenario() -> list[Generation]:
        await server.ready()
        async with fleet_of([server.url], into_servers=into) as fleet:
            await fleet.update_weights(7, weights)
            shutil.rmtree(tmp_path / "pushed", ignore_errors=True)
            return await sample_at_temperatures(fleet)

    assert_sampled_from(policy(7), 7, run(scenario))


@pytest.mark.parametrize(("mode", "into_servers"), [*((mode, "auto") for mode in MODES), ("retract", "gloo")])
def test_pushes_under_load_lose_no_request_and_every_logprob_is_that_of_the_version_recorded_for_its_token(
    server, mode, into_servers
):
    models = {version: policy(version) for version in range(PUSHES + 1)}

    async def scenario() -> tuple[list[Taken], dict[str, float]]:
        await server.ready()
        async with fleet_of([server.url], mode, into_servers) as fleet:
            return await push_under_load(fleet, models, EPISODES)

    assert_nothing_lost(*run(scenario), models, mode)


def without_attention(version: int) -> Any:
    """A policy whose log-probs depend on the last token alone, not on keys and values of other versions."""
    model = policy(version)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    return model


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_with_the_overlap_schedule_every_token_has_the_version_that_sampled_it(model, tmp_path, mode):
    """Paused in place, all of these turns had tokens with the version after theirs (0.5.23)."""
    server, models = (
        RealServer(model, tmp_path / "server.log", overlap=True),
        {v: without_attention(v) for v in range(4)},
    )

    async def scenario() -> list[Generation]:
        await server.ready()
        async with fleet_of([server.url], mode) as fleet:
            await fleet.update_weights(0, parameters(models[0]))
            calls = [
                asyncio.create_task(fleet.generate(start, Sampling(1.0, 200), (), f"s{index}"))
                for index, start in enumerate(prompts(8))
            ]
            for version in (1, 2, 3):
                await asyncio.sleep(0.4)
                await fleet.update_weights(version, parameters(models[version]))
            return await asyncio.gather(*calls)

    try:
        taken = run(scenario)
    finally:
        server.kill()
    assert any(len(set(got.versions)) > 1 for got in taken)
    for start, got in zip(prompts(8), taken, strict=True):
        assert_exact(models, start, got, 1.0)


def test_servers_killed_while_they_generate_and_while_they_are_updated_are_missed_by_nobody(model, server, tmp_path):
    other = RealServer(model, tmp_path / "other.log")

    async def scenario() -> tuple[list[Taken], dict[str, float]]:
        await asyncio.gather(server.ready(), other.ready())
        stop = asyncio.Event()
        async with fleet_of([server.url, other.url]) as fleet:
            await fleet.update_weights(0, parameters(policy(0)))
            await servers_ready(fleet, 2)

            async def trouble() -> None:
                await asyncio.sleep(1)
                other.kill()
                await servers_ready(fleet, 1)
                await fleet.update_weights(1, parameters(policy(1)))
                other.restart()
                await other.ready()
                await servers_ready(fleet, 2)
                pushing = asyncio.create_task(fleet.update_weights(2, parameters(policy(2))))
                await servers_ready(fleet, 0)
                other.kill()
                await pushing
                await asyncio.sleep(1)
                stop.set()

            working = asyncio.create_task(trouble())
            taken = await load(fleet, stop, 8)
            await working
            return taken, dict(fleet.stats().counters)

    try:
        taken, counters = run(scenario)
    finally:
        other.kill()
    models = {version: policy(version) for version in range(3)}
    assert counters["server_faults"] >= 2
    assert counters["lost_segments"] > 0
    assert {int(version) for _, got, _ in taken for version in got.versions} == set(models)
    assert_whole(taken)
    for start, got, _ in some(taken, 60):
        assert_exact(models, start, got, 1.0)


MOMENTS = {"joining": (distributed, "_form"), "broadcast": (distributed.WeightGroup, "finish")}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_killed_in_a_broadcast_is_fenced_comes_back_and_is_brought_up_to_date(server, moment, monkeypatch):
    owner, name = MOMENTS[moment]

    async def scenario() -> Generation:
        await server.ready()
        async with fleet_of([server.url], into_servers="gloo") as fleet:
            with monkeypatch.context() as patched:
                call = getattr(owner, name)
                patched.setattr(owner, name, lambda *given: server.kill() or call(*given))
                pushing = asyncio.create_task(fleet.update_weights(0, parameters(policy(0))))
                await async_until(lambda: fleet.stats().counters["server_faults"] == 1)
            assert fleet.stats().counters["servers_ready"] == 0
            server.restart()
            await server.ready()
            await pushing
            await fleet.update_weights(1, parameters(policy(1)))
            return await fleet.generate(prompts(1)[0], Sampling(1.0, 40), (), "s")

    got = run(scenario)
    assert set(got.versions) == {1}
    assert_exact({1: policy(1)}, prompts(1)[0], got, 1.0)


def test_greedy_turns_are_the_same_with_any_segment_length(server: RealServer) -> None:
    starts = prompts(8, seed=1)

    async def turns(segment_tokens: int) -> list[Generation]:
        await server.ready()
        async with fleet_of([server.url], segment_tokens=segment_tokens) as fleet:
            await fleet.update_weights(4, parameters(policy(4)))
            calls = (fleet.generate(start, Sampling(0.0, 100), (STOP_ID,), str(i)) for i, start in enumerate(starts))
            return await asyncio.gather(*calls)

    whole = run(lambda: turns(0))
    assert any(len(each.tokens) == 100 for each in whole)
    for segment_tokens in (1, 32, 99):
        for start, one, got in zip(starts, whole, run(lambda length=segment_tokens: turns(length)), strict=True):
            np.testing.assert_array_equal(got.tokens, one.tokens)
            assert got.finish_reason == one.finish_reason
            assert_exact({4: policy(4)}, start, got, 0.0)
