"""A server of our own, as `engine.launch` opens it: it is killed or hangs in the middle of a turn, which goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.engine.from_config import open_engine
from asyncrl.engine.sglang.launch import LaunchedServer
from asyncrl.types import Sampling
from tests.engine.real import policy, prompts, save_policy
from tests.engine.support import assert_exact, parameters
from tests.helpers import async_until
from tests.sglang.support import ARGUMENTS, ENVIRONMENT


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    config = TrainConfig(model=ModelConfig(path=str(save_policy(tmp_path / "policy"))))
    config.run.dir = str(tmp_path)
    config.actor.max_tokens = 1024
    engine = config.engine
    engine.kind, engine.launch, engine.python, engine.check_s = "sglang", True, os.environ["ASYNCRL_SGLANG_PYTHON"], 0.5
    engine.server.arguments, engine.server.environment = ARGUMENTS, ENVIRONMENT
    return config


def kill(server: subprocess.Popen[bytes]) -> None:
    server.kill()


def stop_the_scheduler(server: subprocess.Popen[bytes]) -> None:
    """The server's HTTP process goes on."""
    children = psutil.Process(server.pid).children(recursive=True)
    next(each for each in children if "scheduler" in " ".join(each.cmdline())).suspend()


@pytest.mark.parametrize(
    ("harm", "hangs"),
    [
        pytest.param(kill, False, id="killed"),
        pytest.param(stop_the_scheduler, True, id="hung", marks=pytest.mark.long),
    ],
)
def test_a_launched_server_that_is_killed_or_hangs_starts_again_and_its_turns_go_on(
    config: TrainConfig, harm: Callable[[subprocess.Popen[bytes]], None], hangs: bool
) -> None:
    # The killed server must not count as hung. A busy machine is silent for seconds, too.
    config.engine.silence_s = 5.0 if hangs else 60.0

    async def scenario() -> None:
        opened = open_engine(config)
        keepers = [asyncio.ensure_future(keep()) for keep in opened.keepers]
        fleet, server = opened.engine, opened.keepers[-1].__self__  # type: ignore[attr-defined]
        assert isinstance(server, LaunchedServer)
        try:
            await fleet.update_weights(1, parameters(policy(1)))
            turns = [
                asyncio.create_task(fleet.generate(each, Sampling(1.0, 900), (), str(len(each)))) for each in prompts(4)
            ]
            await async_until(lambda: fleet.stats().counters["segments"] >= 4)
            await asyncio.sleep(0.5)
            assert server.process is not None
            harm(server.process)
            await async_until(lambda: server.starts == 2, 300)
            for start, turn in zip(prompts(4), turns, strict=True):
                got = await turn
                assert len(got.tokens) == 900
                assert_exact({1: policy(1)}, start, got, 1.0)
            counters = fleet.stats().counters
            assert counters["lost_segments"] >= 4
            assert (counters["server_hangs"] > 0) == hangs
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await fleet.close()

    asyncio.run(asyncio.wait_for(scenario(), 600))


def test_a_launched_server_computes_with_the_overrides_of_the_configuration(config: TrainConfig) -> None:
    changed = {"rope_parameters": {"rope_theta": 50.0}}
    config.model.override_config = dict(changed)

    async def scenario() -> None:
        opened = open_engine(config)
        keepers = [asyncio.ensure_future(keep()) for keep in opened.keepers]
        try:
            await opened.engine.update_weights(1, parameters(policy(1)))
            start = prompts(1)[0]
            got = await opened.engine.generate(start, Sampling(1.0, 60), (), "session")
            expected = policy(1, rope_parameters={"rope_theta": 50.0, "rope_type": "default"})
            assert_exact({1: expected}, start, got, 1.0)
            with pytest.raises(AssertionError):
                assert_exact({1: policy(1)}, start, got, 1.0)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await opened.engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 600))
