"""Evaluation on the fleet: it waits for its version, tells which versions it really had, and holds no training up."""

from __future__ import annotations

import asyncio

from asyncrl.actor.engine.base import Generation
from asyncrl.types import Sampling
from tests.actor.engine.fleet.fakes import FakeSglang, assert_true, fleet_over, ids, run, serving, tensors
from tests.actor.engine.support import until


def test_an_evaluation_begins_with_its_version_and_records_every_newer_one_while_training_goes_on() -> None:
    servers = FakeSglang(), FakeSglang()
    asked = 2

    async def scenario() -> tuple[list[Generation], list[Generation], int]:
        async with serving(*servers), fleet_over(*servers) as fleet:
            await fleet.update_weights(1, tensors(1))
            await until(lambda: fleet.stats().counters["servers_ready"] == 2)
            trained: list[Generation] = []

            async def train(name: str) -> None:
                while True:
                    trained.append(await fleet.generate(ids(), Sampling(1.0, 20), (), name))

            async def evaluate(name: str) -> Generation:
                await fleet.wait_for_version(asked)
                return await fleet.generate(ids(), Sampling(0.0, 300), (), name)

            training = [asyncio.create_task(train(f"t{i}")) for i in range(4)]
            evaluating = [asyncio.create_task(evaluate(f"e{i}")) for i in range(4)]
            await until(lambda: len(trained) > 4)
            assert not any(300 in server.limits for server in servers)
            await fleet.update_weights(asked, tensors(asked))
            await until(lambda: sum(server.limits.count(300) for server in servers) == 4)
            before = len(trained)
            await fleet.update_weights(3, tensors(3))
            evaluated = await asyncio.gather(*evaluating)
            meanwhile = len(trained) - before
            for task in training:
                task.cancel()
            await asyncio.gather(*training, return_exceptions=True)
            return evaluated, trained, meanwhile

    evaluated, trained, meanwhile = run(scenario)
    for each in (*evaluated, *trained):
        assert_true(each)
    assert {int(version) for each in evaluated for version in each.versions} == {asked, 3}
    assert meanwhile > 4
