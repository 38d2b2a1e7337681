"""The opening of an engine from the configuration."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import EngineConfig, ModelConfig, TrainConfig
from asyncrl.engine import opening
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.engine.fleet.fleet import Fleet
from asyncrl.engine.from_config import open_engine
from asyncrl.errors import ConfigError
from asyncrl.machine.process import WORKER_VARIABLE
from asyncrl.modelling.shapes import model_shapes
from tests.engine.fleet.fakes import FakeSglang, sample, serving
from tests.engine.support import VOCABULARY, tiny_model
from tests.mixtures import save_mixture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny_model().save_pretrained(folder)
    return folder


def configured(model: Path, tmp_path: Path) -> TrainConfig:
    config = TrainConfig(model=ModelConfig(path=str(model)))
    config.run.dir = str(tmp_path)
    config.actor.max_tokens = 64
    return config


def test_the_tensors_that_a_fleet_expects_are_those_of_the_embedded_engine(model: Path) -> None:
    policy = model_shapes(ModelConfig(path=str(model)))
    engine = EmbeddedEngine(tiny_model(), EngineConfig(slots=1, max_length=8))
    assert policy.tensors == engine.expected
    assert policy.vocabulary == VOCABULARY


async def test_a_configured_fleet_pushes_whole_models_by_folder_and_serves(model: Path, tmp_path: Path) -> None:
    config, server = configured(model, tmp_path), FakeSglang()

    async def load(body: Any) -> Any:
        server.weights, server.label = 7, body["weight_version"]
        assert {each.name for each in Path(body["model_path"]).iterdir()} >= {"config.json", "model.safetensors"}
        return {}

    server.answers["update_weights_from_disk"] = load
    async with serving(server):
        config.engine.kind, config.engine.urls = "sglang", [server.url]
        opened = open_engine(config)
        assert isinstance(opened.engine, Fleet)
        keepers = [asyncio.ensure_future(keep()) for keep in opened.keepers]
        await opened.engine.update_weights(7, dict(tiny_model().named_parameters()))
        assert (await sample(opened.engine, 3)).versions.tolist() == [7, 7, 7]
        for keeper in keepers:
            keeper.cancel()
        await opened.engine.close()


async def test_servers_of_our_own_have_a_keeper_each(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path)
    config.engine.kind = "sglang"
    config.engine.urls = ["http://127.0.0.1:1"]
    without = len(open_engine(config).keepers)
    config.engine.launch, config.engine.server.count = True, 2
    assert len(open_engine(config).keepers) == without + 2


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_experts_of_a_model_without_any_or_too_many_for_a_message_are_refused_by_name(
    model: Path, tmp_path: Path, kind: str
) -> None:
    config = configured(model, tmp_path)
    config.engine = EngineConfig(kind=kind, urls=["http://127.0.0.1:1"], return_routed_experts=True)
    with pytest.raises(ConfigError, match="experts of a qwen3 model cannot be replayed"):
        open_engine(config)
    config.model.path = str(save_mixture(tmp_path / "mixture", "qwen3_moe"))
    config.network.max_message_mb, config.actor.max_tokens = 1, (1 << 18) + 1
    with pytest.raises(ConfigError, match=r"network\.max_message_mb.* 4 bytes a token"):
        open_engine(config)


def commands(config: TrainConfig, monkeypatch: pytest.MonkeyPatch, gpu: int | None) -> list[str]:
    """The command lines of the servers that an actor with SGLang 0.5.17 and GPUs of `gpu` bytes would start."""
    found: list[str] = []

    def server(url: str, command: list[str], *_: object) -> SimpleNamespace:
        found.append(" ".join(command))
        return SimpleNamespace(url=url, keep=None)

    monkeypatch.setattr(opening, "LaunchedServer", server)
    monkeypatch.setattr(opening, "installed_version", lambda *_: (0, 5, 17))
    monkeypatch.setattr(opening, "gpu_bytes", lambda _: gpu)
    config.engine.kind = "sglang"
    open_engine(config)
    return found


def test_each_server_is_started_for_its_share_of_the_actors_episodes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(model, tmp_path)
    config.actor.concurrency, config.engine.server.count = 512, 4
    found = commands(config, monkeypatch, None)
    assert len(found) == 4
    assert all("--max-running-requests 168 --cuda-graph-max-bs-decode 168" in each for each in found)
    assert not any("--max-total-tokens" in each or "--mem-fraction-static" in each for each in found)


def test_no_two_servers_of_a_run_begin_with_the_same_random_numbers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As happened in verl: servers with equal seeds give equal answers to equal prompts, such as those of a group.
    config = configured(model, tmp_path)
    config.engine.server.count = 2

    def seeds(actor: str) -> list[str]:
        monkeypatch.setenv(WORKER_VARIABLE, actor)
        return [re.findall(r"--random-seed (\d+)", each)[0] for each in commands(config, monkeypatch, None)]

    found = [*seeds("actor-0"), *seeds("actor-1")]
    assert len(set(found)) == 4
    assert seeds("actor-0") == found[:2]
    config.run.seed += 1
    assert set(seeds("actor-0")).isdisjoint(found)


@pytest.mark.parametrize(("agent", "limited"), [("tests.agent.play", False), ("openenv", True), (None, True)])
def test_servers_of_an_agent_that_may_request_turns_in_parallel_have_no_limit_of_requests(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str | None, limited: bool
) -> None:
    config = configured(model, tmp_path)
    config.actor.concurrency, config.engine.server.count, config.actor.agent = 64, 1, agent
    [command] = commands(config, monkeypatch, None)
    assert ("--max-running-requests" in command) == limited
    assert f"--cuda-graph-max-bs-decode {72 if limited else 136}" in command


def test_servers_on_one_gpu_divide_what_the_learner_leaves_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(model, tmp_path)
    server = config.engine.server
    config.actor.concurrency, server.count, server.per_gpu = 512, 4, 2
    found = commands(config, monkeypatch, 80 * 10**9)
    assert ["--base-gpu-id 0" in each for each in found] == [True, True, False, False]
    wanted = f"--mem-fraction-static 0.95 --max-total-tokens {168 * config.actor.max_tokens}"
    assert all(wanted in each for each in found)
    server.memory, server.shared = 0.3, [0, 1]
    with pytest.raises(ConfigError, match=r"engine\.server\.per_gpu=2: 30% of a GPU's 80 GB"):
        commands(config, monkeypatch, 80 * 10**9)
