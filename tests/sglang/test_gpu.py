"""Ways of weights into a real server on a GPU of this machine."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncrl.engine.base import Generation
from asyncrl.engine.fleet.colocation import GpuSharing
from asyncrl.engine.sglang.inside import FOLDER, LOADER
from asyncrl.engine.sglang.routes.opening import ServerRouteSettings
from asyncrl.engine.sglang.server import SglangServer
from asyncrl.machine.gpu_lock import LearnerLock, ServersLock
from asyncrl.types import Sampling
from tests.engine.real import ServerProcess, fleet_over, policy, prompts
from tests.engine.support import parameters, plain_logprobs
from tests.helpers import async_until
from tests.sglang.test_colocation import Process

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ARGUMENTS = ["--dtype", "bfloat16", "--host", "127.0.0.1", "--mem-fraction-static", "0.3", "--sleep-on-idle"]
ARGUMENTS += ["--attention-backend", "triton", "--disable-cuda-graph", "--max-total-tokens", "32768"]
CACHE_BYTES = 8 << 20
"""Less than what 32,768 tokens of keys and values take."""
TOLERANCE = 0.1
"""The tolerance for activations in bfloat16, which the GPU kernels of servers need; other weights are further away."""


def rounded(version: int) -> Any:
    """The policy of a version with weights that bfloat16 holds exactly; it computes in float32."""
    return policy(version).to(torch.bfloat16).float()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = started(model, tmp_path_factory.mktemp("gpu") / "server.log")
    yield server
    server.kill()


def started(model: Path, log: Path, *arguments: str) -> ServerProcess:
    command = [os.environ["ASYNCRL_SGLANG_PYTHON"], "-m", "sglang.launch_server", "--model-path", str(model)]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
    }
    return ServerProcess([*command, *ARGUMENTS, *arguments], environment, "/get_model_info", log)


def farthest(model: Any, start: NDArray[np.int32], got: Generation) -> float:
    """The largest difference between the log-probs of a generation and those that `model` gives."""
    whole = np.concatenate([start, got.tokens])
    return float(np.abs(plain_logprobs(model, whole, 1.0)[len(start) - 1 :] - got.logprobs).max())


@pytest.mark.parametrize(("wanted", "taken"), [("auto", "ipc"), ("disk", "disk"), ("gloo", "gloo")])
async def test_a_server_on_a_gpu_of_this_machine_serves_what_it_got_by_the_fastest_way(
    server: ServerProcess, wanted: str, taken: str
) -> None:
    opened: list[SglangServer] = []

    def open_server(url: str) -> SglangServer:
        opened.append(SglangServer(url, context=512, settings=ServerRouteSettings(wanted), silence_s=60))
        return opened[-1]

    await server.ready()
    async with fleet_over([server.url], open_server, rounded(0).to(torch.bfloat16)) as fleet:
        for version in range(1, 4):
            await fleet.update_weights(version, parameters(rounded(version).to(torch.bfloat16)))
            for index, start in enumerate(prompts(4)):
                got = await fleet.generate(start, Sampling(1.0, 40), (), f"{version}.{index}")
                assert set(got.versions) == {version}
                assert farthest(rounded(version), start, got) < TOLERANCE
                assert farthest(rounded(0), start, got) > 3 * TOLERANCE
        assert opened[-1].route == taken


async def test_a_server_that_keeps_a_buffer_serves_each_version_and_a_dead_one_leaves_no_memory_taken(
    model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    server = started(model, log, "--custom-weight-loader", LOADER)

    def open_server(url: str) -> SglangServer:
        return SglangServer(url, context=512, settings=ServerRouteSettings("ipc"), silence_s=60)

    torch.cuda.ipc_collect()
    before = torch.cuda.memory_allocated()
    try:
        await server.ready()
        async with fleet_over([server.url], open_server, rounded(0).to(torch.bfloat16)) as fleet:
            for version in range(5):
                await fleet.update_weights(version, parameters(rounded(version).to(torch.bfloat16)))
                for index, start in enumerate(prompts(4)):
                    got = await fleet.generate(start, Sampling(1.0, 40), (), f"{version}.{index}")
                    assert set(got.versions) == {version}
                    assert farthest(rounded(version), start, got) < TOLERANCE
            server.kill()
    finally:
        server.kill()
    assert "by copies at once" in log.read_text()
    del fleet, got
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() == before


async def test_a_server_frees_its_memory_in_the_learners_turn_and_serves_the_next_version(
    model: Path, tmp_path: Path
) -> None:
    server = started(model, tmp_path / "server.log", "--enable-memory-saver")
    try:
        await server.ready()
        learner, sharing = LearnerLock(tmp_path / "gpus", 0), GpuSharing(ServersLock(tmp_path / "gpus", 1))
        sharing.add(Process(server.url))
        learner.give_back(0)
        keeper = asyncio.create_task(sharing.keep())

        def open_server(url: str) -> SglangServer:
            return SglangServer(url, context=512, silence_s=60)

        async with fleet_over([server.url], open_server, rounded(0).to(torch.bfloat16), sharing=sharing) as fleet:
            await fleet.update_weights(0, parameters(rounded(0).to(torch.bfloat16)))
            for version in range(1, 4):
                before = torch.cuda.mem_get_info()[0]
                learner.ask()
                await async_until(learner.is_ours)
                assert torch.cuda.mem_get_info()[0] - before > CACHE_BYTES
                learner.give_back(version)
                await fleet.update_weights(version, parameters(rounded(version).to(torch.bfloat16)))
                for index, start in enumerate(prompts(4)):
                    got = await fleet.generate(start, Sampling(1.0, 40), (), f"{version}.{index}")
                    assert set(got.versions) == {version}
                    assert farthest(rounded(version), start, got) < TOLERANCE
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
    finally:
        server.kill()
