"""The fleet over a real vLLM: exact log-probs and versions, no matter what is updated, cancelled or killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.base import Generation
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.fleet.http import Http
from asyncrl.engine.fleet.server import ServerFaultError
from asyncrl.engine.fleet.update import Update
from asyncrl.engine.vllm.server import VllmServer
from asyncrl.types import Sampling
from tests.engine import real
from tests.engine.real import (
    CONTEXT,
    ServerProcess,
    Taken,
    assert_no_bad_version,
    assert_nothing_lost,
    assert_sampled_from,
    assert_whole,
    fleet_over,
    load,
    needs,
    prompts,
    push_good_and_bad,
    push_under_load,
    run,
    sample_at_temperatures,
    servers_ready,
)
from tests.engine.support import assert_exact, parameters
from tests.helpers import async_until

pytestmark = needs("vLLM", "ASYNCRL_VLLM_PYTHON")

PUSHES = int(os.environ.get("ASYNCRL_VLLM_PUSHES", "6"))
EPISODES = 8
ARGUMENTS = ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT)]
ARGUMENTS += ["--logprobs-mode", "processed_logprobs"]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
UNTIED = {"tie_word_embeddings": False}
DEFAULTS = {"temperature": 0.3, "top_k": 5, "top_p": 0.5, "repetition_penalty": 1.5, "eos_token_id": [3, 7, 9]}
"""The settings of a model's folder that a server may follow unless a request says otherwise."""


def policy(seed: int) -> Any:
    return real.policy(seed, **UNTIED)


def save_policy(folder: Path) -> Path:
    real.save_policy(folder, **UNTIED)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return folder


class RealServer(ServerProcess):
    """vLLM over the folder `model`."""

    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        command = [os.environ["ASYNCRL_VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        super().__init__([*command, *ARGUMENTS, *arguments], ENVIRONMENT, "/health", log)


class SilentServer(VllmServer):
    """Is asked as a server without `--enable-scale-out`, which tells no versions."""

    async def _tells_versions(self) -> bool:
        return False


def fleet_of(
    url: str, mode: str = "retract", kind: type[VllmServer] = VllmServer, **options: Any
) -> AbstractAsyncContextManager[Fleet]:
    """A fleet over the server at `url`, kept until the end."""

    def open_server(url: str) -> VllmServer:
        return kind(url, context=512, tied=False, silence_s=30)

    return fleet_over([url], open_server, policy(0), mode, **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server for all; who kills it starts it again."""
    model = save_policy(tmp_path_factory.mktemp("policy"))
    server = RealServer(model, tmp_path_factory.mktemp("logs") / "server.log", "--enable-scale-out")
    yield server
    server.kill()


KINDS = [VllmServer, SilentServer]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_the_hugging_face_model_at_every_temperature_and_after_every_push(
    server: RealServer, kind: type[VllmServer]
) -> None:
    async def scenario() -> list[list[Generation]]:
        await server.ready()
        async with fleet_of(server.url, kind=kind) as fleet:
            sampled = []
            for version in (7, 8):
                await fleet.update_weights(version, parameters(policy(version)))
                sampled.append(await sample_at_temperatures(fleet))
            return sampled

    before, behind = run(scenario)
    assert_sampled_from(policy(7), 7, before)
    assert_sampled_from(policy(8), 8, behind)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [*((mode, VllmServer) for mode in ("retract", "in_place", "abort", "drain")), ("abort", SilentServer)],
)
def test_pushes_under_load_lose_no_request_and_every_logprob_is_that_of_the_version_recorded_for_its_token(
    server: RealServer, mode: str, kind: type[VllmServer]
) -> None:
    models = {version: policy(version) for version in range(PUSHES + 1)}

    async def scenario() -> tuple[list[Taken], dict[str, float]]:
        await server.ready()
        async with fleet_of(server.url, mode, kind) as fleet:
            return await push_under_load(fleet, models, EPISODES)

    assert_nothing_lost(*run(scenario), models, mode)


class Stumbling(VllmServer):
    """Leaves the server in the middle of its second update."""

    loads = 0

    async def load(self, update: Update) -> None:
        self.loads += 1
        if self.loads == 2:
            nowhere = {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}
            await self._http.post("/collective_rpc", nowhere, 30)
        await super().load(update)


def test_an_update_that_fails_under_requests_is_made_up_for_by_a_whole_one(server: RealServer) -> None:
    models = {version: policy(version) for version in range(3)}

    async def scenario() -> tuple[list[Taken], dict[str, float]]:
        await server.ready()
        async with fleet_of(server.url, kind=Stumbling) as fleet:
            return await push_under_load(fleet, models, EPISODES)

    taken, counters = run(scenario)
    assert server.process.poll() is None
    assert (counters["server_faults"], counters["server_updates"]) == (1, 3)
    assert_whole(taken)
    for start, got, _ in taken:
        assert_exact(models, start, got, 1.0)


def test_a_cancelled_turn_leaves_the_server(server: RealServer) -> None:
    async def running(http: Http) -> float:
        told = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", await http.get("/metrics", 30), re.MULTILINE)
        assert told is not None
        return float(told.group(1))

    async def scenario() -> None:
        await server.ready()
        http = Http(server.url)
        async with fleet_of(server.url) as fleet:
            await fleet.update_weights(1, parameters(policy(1)))
            turn = asyncio.create_task(fleet.generate(prompts(1)[0], Sampling(1.0, 1900), (), "s"))
            while await running(http) != 1:
                await asyncio.sleep(0.05)
            turn.cancel()
            while await running(http) != 0:
                await asyncio.sleep(0.05)
            await asyncio.wait([turn])
            assert turn.cancelled()
        await http.close()

    run(scenario)


def test_a_server_killed_while_it_generates_comes_back_with_the_newest_weights_and_its_turns_go_on(
    server: RealServer,
) -> None:
    async def scenario() -> tuple[list[Taken], dict[str, float]]:
        await server.ready()
        stop = asyncio.Event()
        async with fleet_of(server.url, segment_tokens=32) as fleet:
            await fleet.update_weights(1, parameters(policy(1)))
            working = asyncio.create_task(load(fleet, stop, EPISODES))
            await async_until(lambda: fleet.stats().counters["segments"] >= 2 * EPISODES)
            server.kill()
            await servers_ready(fleet, 0)
            pushing = asyncio.create_task(fleet.update_weights(2, parameters(policy(2))))
            server.restart()
            await server.ready()
            await pushing
            stop.set()
            return await working, dict(fleet.stats().counters)

    taken, counters = run(scenario)
    assert counters["server_faults"] >= 1
    assert counters["lost_segments"] >= EPISODES
    assert {int(version) for _, got, _ in taken for version in got.versions} == {1, 2}
    assert_whole(taken)
    for start, got, _ in taken:
        assert_exact({1: policy(1), 2: policy(2)}, start, got, 1.0)


@pytest.mark.parametrize(("mode", "kind"), [("retract", VllmServer), ("abort", SilentServer)])
def test_versions_that_repeat_their_canary_are_served_under_load_and_others_are_not(
    server: RealServer, mode: str, kind: type[VllmServer]
) -> None:
    models = {version: policy(version) for version in range(5)}

    async def scenario() -> list[Generation]:
        await server.ready()
        async with fleet_of(server.url, mode, kind) as fleet:
            return await push_good_and_bad(fleet, models)

    assert_no_bad_version(run(scenario), models)


def test_a_policy_with_tied_embeddings_is_refused_where_an_update_would_miss_its_output_layer(
    server: RealServer,
) -> None:
    async def scenario() -> None:
        await server.ready()
        tied = VllmServer(server.url, context=512, tied=True)
        try:
            with pytest.raises(ServerFaultError, match="tie_word_embeddings"):
                await tied.join()
        finally:
            await tied.close()

    run(scenario)
