"""Experts pushed into a real server, which knows them one by one: SGLang passes over names that it does not know, and
answers that the update succeeded."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.actor.engine.base import Generation
from asyncrl.actor.engine.sglang.server import SglangServer
from asyncrl.actor.engine.sglang.ways import WaySettings
from asyncrl.config.schema import ModelConfig
from asyncrl.learner.export import folder_writer
from asyncrl.types import Sampling
from asyncrl.weights.folders import Weights, read_folder, write_folder
from tests.actor.engine.real import fleet_over, prompts, run
from tests.actor.engine.support import parameters, plain_logprobs
from tests.actor.fakes import make_tokenizer
from tests.mixtures import mixture
from tests.sglang.support import RealServer

WAYS = ["disk", "the learner's folder", "gloo"]


SIZES = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32, "max_position_embeddings": 2048}


def policy(seed: int, family: str = "qwen3_moe") -> Any:
    return mixture(family, seed, vocab_size=len(make_tokenizer()), **SIZES)


def with_experts_of(seed: int) -> Any:
    """The policy of the server's folder with other experts, and nothing else changed."""
    model, other = policy(1000), dict(policy(seed).named_parameters())
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data = other[name].data
    return model


def with_another_bias() -> Any:
    """The policy of the server's folder with another persistent buffer, and nothing else changed."""
    model = policy(1000, "glm4_moe")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([3.0, -3.0, 2.0, -2.0]))
    return model


def save(folder: Path, family: str) -> Path:
    policy(1000, family).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def serve(server: RealServer, folder: Path, model: Any, version: int, way: str, space: Path) -> list[Generation]:
    """Publisher `model` as `version`; what the server then generates for prompts(4)."""
    weights: Weights = parameters(model)
    into = way
    if way == "the learner's folder":
        into, write_config = "disk", folder_writer(ModelConfig(str(folder)))
        weights = read_folder(write_folder(space / "pushed", version, weights, write_config), version)

    def open_server(url: str) -> SglangServer:
        return SglangServer(url, context=512, settings=WaySettings(into, bucket_bytes=64 << 10), silence_s=300)

    async def scenario() -> list[Generation]:
        await server.ready()
        async with fleet_over([server.url], open_server, model) as fleet:
            await fleet.update_weights(version, weights)
            shutil.rmtree(space / "pushed", ignore_errors=True)
            return await asyncio.gather(
                *(fleet.generate(start, Sampling(1.0, 40), (), f"s{i}") for i, start in enumerate(prompts(4)))
            )

    return run(scenario)


def assert_served(model: Any, version: int, folder: Path, sampled: list[Generation]) -> None:
    """The log-probs are those of `model`, and far from those of the folder with which the server was started."""
    old = AutoModelForCausalLM.from_pretrained(folder).eval()
    for start, got in zip(prompts(4), sampled, strict=True):
        whole, first = np.concatenate([start, got.tokens]), len(start) - 1
        assert set(got.versions) == {version}
        assert np.abs(plain_logprobs(model, whole, 1.0)[first:] - got.logprobs).max() < 1e-2
        assert np.abs(plain_logprobs(old, whole, 1.0)[first:] - got.logprobs).max() > 1e-1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.fixture(scope="module")
def mixed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    server = RealServer(folder, tmp_path_factory.mktemp("logs") / "server.log")
    yield server
    server.kill()


@pytest.mark.parametrize("way", WAYS)
def test_pushed_experts_are_served_log_prob_for_log_prob(mixed: RealServer, folder: Path, way: str, tmp_path: Path):
    version = WAYS.index(way)
    model = with_experts_of(version)
    assert_served(model, version, folder, serve(mixed, folder, model, version, way, tmp_path))


def test_a_pushed_buffer_is_served_log_prob_for_log_prob(tmp_path: Path):
    folder = save(tmp_path / "mixture", "glm4_moe")
    server = RealServer(folder, tmp_path / "server.log")
    try:
        for version, way in enumerate(("gloo", "the learner's folder")):
            model = with_another_bias()
            assert_served(model, version, folder, serve(server, folder, model, version, way, tmp_path / way))
    finally:
        server.kill()
