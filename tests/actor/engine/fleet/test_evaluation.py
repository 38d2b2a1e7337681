"""Evaluation on the fleet: a server is lent to it, which keeps its version, and training goes on with the others."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from asyncrl.actor.engine.base import Generation
from asyncrl.actor.engine.fleet.fleet import Fleet
from asyncrl.types import Sampling
from tests.actor.engine.fleet.fakes import FakeSglang, assert_true, fleet_over, ids, run, serving, tensors
from tests.helpers import async_until

ASKED = 2
LONG = 300


async def evaluate(fleet: Fleet, name: str, turns: int = 1) -> Generation:
    """An episode of an evaluation: its last turn."""
    try:
        await fleet.wait_for_version(ASKED, pin=name)
        for turn in range(turns):
            answer = await fleet.generate(ids(), Sampling(0.0, LONG), (), f"{name}/0" if turn else name)
        return answer
    finally:
        fleet.release(name)


@asynccontextmanager
async def training(fleet: Fleet) -> AsyncIterator[dict[str, list[Generation]]]:
    """Sessions of training, one turn after another."""
    trained: dict[str, list[Generation]] = defaultdict(list)

    async def train(name: str) -> None:
        while True:
            trained[name].append(await fleet.generate(ids(), Sampling(1.0, 20), (), name))

    tasks = [asyncio.create_task(train(f"t{i}")) for i in range(4)]
    try:
        await async_until(lambda: len(trained) == len(tasks))
        yield trained
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def versions(generations: list[Generation]) -> set[int]:
    for each in generations:
        assert_true(each)
    return set(np.concatenate([each.versions for each in generations]).tolist())


async def ready(fleet: Fleet, count: int) -> None:
    await async_until(lambda: fleet.stats().counters["servers_ready"] == count)


def under_way(*servers: FakeSglang) -> int:
    return sum(request.limit == LONG for server in servers for request in server.running)


def test_an_evaluation_has_its_version_alone_while_training_goes_on_with_newer_ones() -> None:
    servers = FakeSglang(), FakeSglang(), FakeSglang()

    async def scenario() -> tuple[list[Generation], list[Generation]]:
        async with serving(*servers), fleet_over(*servers) as fleet:
            await fleet.update_weights(1, tensors(1))
            await ready(fleet, 3)
            async with training(fleet) as trained:
                evaluating = [asyncio.create_task(evaluate(fleet, f"e{i}", turns=2)) for i in range(4)]
                assert not under_way(*servers)
                await fleet.update_weights(ASKED, tensors(ASKED))
                await async_until(lambda: under_way(*servers) == 4)
                assert fleet.stats().counters["servers_lent"] == 1
                for version in (3, 4):
                    await fleet.update_weights(version, tensors(version))
                late = asyncio.create_task(evaluate(fleet, "late"))
                counts = {name: len(turns) for name, turns in trained.items()}
                await async_until(lambda: all(len(turns) > counts[name] + 1 for name, turns in trained.items()))
                assert all(not task.done() for task in evaluating), "the test is to see training meanwhile"
                evaluated = list(await asyncio.gather(*evaluating, late))
                return evaluated, [turn for name, turns in trained.items() for turn in turns[counts[name] + 1 :]]

    evaluated, trained = run(scenario)
    assert versions(evaluated) == {ASKED}
    assert versions(trained) == {4}


def test_a_lent_server_comes_back_to_training_with_the_newest_version() -> None:
    servers, now = (FakeSglang(), FakeSglang()), [0.0]

    async def scenario() -> None:
        async with serving(*servers), fleet_over(*servers, clock=lambda: now[0]) as fleet:
            await fleet.update_weights(1, tensors(1))
            await ready(fleet, 2)
            evaluating = asyncio.create_task(evaluate(fleet, "e"))
            await fleet.update_weights(ASKED, tensors(ASKED))
            await fleet.update_weights(3, tensors(3))
            assert versions([await evaluating]) == {ASKED}
            assert versions([await evaluate(fleet, "next")]) == {ASKED}, "it stays lent for the next episode"
            now[0] += 10
            await async_until(lambda: all(server.weights == 3 for server in servers))
            assert fleet.stats().counters["servers_lent"] == 0
            assert versions([await evaluate(fleet, "too late")]) == {3}

    run(scenario)


def test_training_is_never_left_without_a_server() -> None:
    alone, mortal, left = FakeSglang(), FakeSglang(), FakeSglang()

    async def one_server() -> set[int]:
        async with serving(alone), fleet_over(alone) as fleet:
            evaluating = asyncio.create_task(evaluate(fleet, "e"))
            await fleet.update_weights(ASKED, tensors(ASKED))
            await async_until(lambda: under_way(alone) == 1)
            await fleet.update_weights(3, tensors(3))
            return versions([await evaluating])

    async def the_other_dies() -> None:
        async with serving(mortal, left), fleet_over(mortal, left) as fleet:
            await fleet.update_weights(1, tensors(1))
            await ready(fleet, 2)
            evaluating = asyncio.create_task(evaluate(fleet, "e", turns=4))
            await fleet.update_weights(ASKED, tensors(ASKED))
            await async_until(lambda: under_way(mortal, left) == 1)
            lent, other = (mortal, left) if under_way(mortal) else (left, mortal)
            await fleet.update_weights(3, tensors(3))
            assert lent.weights == ASKED
            await other.die()
            await async_until(lambda: lent.weights == 3)
            assert_true(await fleet.generate(ids(), Sampling(1.0, 20), (), "t"))
            assert_true(await evaluating)

    assert run(one_server) == {ASKED, 3}
    run(the_other_dies)


def test_an_evaluation_whose_server_dies_goes_on_with_the_others() -> None:
    servers = FakeSglang(), FakeSglang()

    async def scenario() -> Generation:
        async with serving(*servers), fleet_over(*servers) as fleet:
            await fleet.update_weights(1, tensors(1))
            await ready(fleet, 2)
            evaluating = asyncio.create_task(evaluate(fleet, "e"))
            await fleet.update_weights(ASKED, tensors(ASKED))
            await async_until(lambda: under_way(*servers) == 1)
            await fleet.update_weights(3, tensors(3))
            (lent,) = [server for server in servers if server.weights == ASKED]
            await lent.die()
            return await evaluating

    assert versions([run(scenario)]) == {3}
