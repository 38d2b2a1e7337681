"""A real server in turns with a learner. On the CPU it frees nothing, and yet its scheduler ends if a call comes at the
wrong time: when it is not idle, or to regain what was not freed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from asyncrl.engine.fleet.colocation import GpuSharing
from asyncrl.machine.gpu_lock import LearnerLock, ServersLock
from tests.engine.real import Taken, assert_nothing_lost, load, policy, run
from tests.engine.support import parameters
from tests.helpers import async_until
from tests.sglang.support import RealServer, fleet_of

TURNS = 4


@dataclass
class Process:
    url: str
    starts: int = 1
    answering: bool = True
    freed: bool = False
    running: bool = True

    def end(self) -> None:
        raise AssertionError("the server failed in a turn")


def test_a_server_under_load_takes_turns_and_every_logprob_is_that_of_the_version_recorded_for_its_token(
    server: RealServer, tmp_path: Path
) -> None:
    models = {version: policy(version) for version in range(TURNS + 1)}

    async def scenario() -> tuple[list[Taken], dict[str, float]]:
        await server.ready()
        learner, sharing = LearnerLock(tmp_path, 0), GpuSharing(ServersLock(tmp_path, 1))
        process = Process(server.url)
        sharing.add(process)
        learner.give_back(0)
        keeper = asyncio.create_task(sharing.keep())
        async with fleet_of([server.url], sharing=sharing) as fleet:
            await fleet.update_weights(0, parameters(models[0]))
            stop = asyncio.Event()
            episodes = asyncio.create_task(load(fleet, stop, 8))
            for version in range(1, TURNS + 1):
                sampled = fleet.stats().tokens
                await async_until(lambda before=sampled: fleet.stats().tokens > before)
                learner.ask()
                await async_until(learner.is_ours)
                assert process.freed
                learner.give_back(version)
                await fleet.update_weights(version, parameters(models[version]))
            stop.set()
            taken, counters = await episodes, dict(fleet.stats().counters)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        assert counters["gpu_periods"] == TURNS + 1
        return taken, counters

    assert_nothing_lost(*run(scenario), models, "abort")
