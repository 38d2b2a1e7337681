"""The fleet over real servers: exact log-probs and versions, whatever is updated, aborted or killed meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from asyncrl.actor.engine.base import Generation
from asyncrl.actor.engine.fleet.fleet import Fleet
from asyncrl.types import Sampling
from tests.actor.engine.support import assert_exact, parameters
from tests.sglang.support import STOP_ID, RealServer, fleet_of, folders, policy, prompts, run

PUSHES = int(os.environ.get("ASYNCRL_SGLANG_PUSHES", "6"))
EPISODES = 32
Taken = tuple[Any, Generation, int]
"""What was continued, what came, and the version that was served when it was asked for."""
MODES = ["retract", "abort", "in_place", "drain"]


@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_logprobs_are_those_of_the_hugging_face_model_at_every_temperature(server, transport, tmp_path):
    temperatures = [0.0, 0.5, 1.0, 1.7]

    async def scenario() -> list[Generation]:
        await server.ready()
        async with fleet_of([server.url], transports=[transport], folders=folders(tmp_path)) as fleet:
            await fleet.update_weights(7, parameters(policy(7)))
            calls = [
                fleet.generate(start, Sampling(temperature, 40), (STOP_ID,), f"s{i}{temperature}")
                for i, start in enumerate(prompts(4))
                for temperature in temperatures
            ]
            return await asyncio.gather(*calls)

    cases = [(start, temperature) for start in prompts(4) for temperature in temperatures]
    for (start, temperature), got in zip(cases, run(scenario), strict=True):
        assert set(got.versions) == {7}
        assert_exact({7: policy(7)}, start, got, temperature)
        assert got.finish_reason == ("stop" if got.tokens[-1] == STOP_ID else "length")
        assert got.finish_reason == "stop" or len(got.tokens) == 40


async def episode(fleet: Fleet, name: str, start: np.ndarray[Any, Any], turns: int = 3) -> list[Taken]:
    """Turns of one session, each of which continues all before it."""
    taken = []
    tokens = start
    for _ in range(turns):
        asked_at = fleet.version
        got = await fleet.generate(tokens, Sampling(1.0, 150), (), name)
        taken.append((tokens, got, asked_at))
        tokens = np.concatenate([tokens, got.tokens, start[:3]])
    fleet.release(name)
    return taken


async def load(fleet: Fleet, stop: asyncio.Event, episodes: int = EPISODES) -> AsyncIterator[Taken]:
    """`episodes` at once until `stop`; every one that was begun is finished."""
    taken: list[Taken] = []

    async def work(index: int, start: np.ndarray[Any, Any]) -> None:
        count = 0
        while not stop.is_set():
            taken.extend(await episode(fleet, f"e{index}.{count}", start))
            count += 1

    await asyncio.gather(*(work(index, start) for index, start in enumerate(prompts(episodes))))
    for each in taken:
        yield each


async def pushes(fleet: Fleet, count: int, stop: asyncio.Event) -> None:
    for version in range(1, count + 1):
        await asyncio.sleep(0.4)
        await fleet.update_weights(version, parameters(policy(version)))
    await asyncio.sleep(0.4)
    stop.set()


@pytest.mark.parametrize("mode", MODES)
def test_pushes_under_load_lose_no_request_and_every_logprob_is_that_of_the_version_recorded_for_its_token(
    server, mode
):
    async def scenario() -> tuple[list[Taken], dict[str, float]]:
        await server.ready()
        stop = asyncio.Event()
        async with fleet_of([server.url], mode) as fleet:
            await fleet.update_weights(0, parameters(policy(0)))
            pushing = asyncio.create_task(pushes(fleet, PUSHES, stop))
            taken = [each async for each in load(fleet, stop)]
            await pushing
            return taken, dict(fleet.stats().counters)

    taken, counters = run(scenario)
    models = {version: policy(version) for version in range(PUSHES + 1)}
    spanning = [case for case in taken if len(set(case[1].versions)) > 1]
    assert counters["server_updates"] == PUSHES + 1
    assert counters["server_faults"] == counters["lost_segments"] == 0
    assert {int(version) for _, got, _ in taken for version in got.versions} == set(models)
    assert all(got.finish_reason == "length" and len(got.tokens) == 150 for _, got, _ in taken)
    assert all((np.diff(got.versions) >= 0).all() for _, got, _ in taken)
    assert spanning or mode == "drain"
    for start, got, asked_at in [*spanning[:40], *taken[:: max(1, len(taken) // 40)]]:
        if mode == "in_place":
            got = up_to_the_first_push(got, asked_at)
        assert_exact(models, start, got, 1.0)


def up_to_the_first_push(got: Generation, asked_at: int) -> Generation:
    """Behind it, and in a request that met one on its way, keys and values of older weights are there by intent."""
    first = got.versions == asked_at
    return Generation(got.tokens[first], got.logprobs[first], got.versions[first], got.finish_reason)


async def servers_ready(fleet: Fleet, count: int) -> None:
    while fleet.stats().counters["servers_ready"] != count:
        await asyncio.sleep(0.001)


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
            taken = [each async for each in load(fleet, stop, 8)]
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
    assert all(got.finish_reason == "length" and len(got.tokens) == 150 for _, got, _ in taken)
    for start, got, _ in taken[:: max(1, len(taken) // 60)]:
        assert_exact(models, start, got, 1.0)
