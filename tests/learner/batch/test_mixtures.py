"""Mixtures of experts and persistent buffers: from the learner into folders, exports and engines."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.config.schema import EngineConfig, ModelConfig
from asyncrl.engine.embedded import EmbeddedEngine
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.checkpoint.export import export, folder_writer
from asyncrl.learner.checkpoint.gathering import gather_all
from asyncrl.learner.model.policy import Policy, load_policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.modelling.shapes import model_shapes
from asyncrl.types import Sampling
from asyncrl.weights.folders import write_folder
from asyncrl.weights.manifest import DTYPES
from tests.engine.support import assert_exact
from tests.learner.support import VOCABULARY
from tests.mixtures import MIXTURES, save_mixture

pytestmark = pytest.mark.slow

EMBEDDED = [family for family in MIXTURES if family != "deepseek_v3"]
"""The embedded engine knows no latent attention."""

PROMPT = np.arange(5, 17, dtype=np.int32)


@pytest.fixture(params=MIXTURES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = save_mixture(tmp_path / "policy", request.param, vocab_size=VOCABULARY)
    build_tokenizer().save_pretrained(folder)
    return folder


def changed(folder: Path, ranks: Ranks, dtype: str = "float32") -> Policy:
    """A policy whose weights are not those of its folder."""
    policy = load_policy(ModelConfig(str(folder), dtype=dtype), 1.0, ranks, 64)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_((parameter * 40).sin() * 0.2)
    return policy


def logprobs(policy: Policy, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        values, _ = policy(PackedSequences.of([torch.from_numpy(tokens).long()]))
    return values.numpy()


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.from_numpy(PROMPT).long()[None]).logits[0]


def assert_loads_as(policy: Policy, folder: Path) -> None:
    ids = torch.from_numpy(PROMPT).long()
    loaded = logits(folder)[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(loaded, torch.from_numpy(logprobs(policy, PROMPT))[1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_and_a_pushed_folder_hold_what_was_trained_and_buffers_in_their_own_dtype(
    folder: Path, ranks: Ranks, tmp_path: Path, dtype: str
):
    config, policy = ModelConfig(str(folder), dtype=dtype), changed(folder, ranks, dtype)
    tensors = gather_all(policy.model, policy.weight_format, DTYPES[dtype], ranks)
    export(policy, config, tmp_path / "exported", ranks, threading.Event())
    pushed = write_folder(tmp_path, 1, tensors, folder_writer(config))
    original = load_file(folder / "model.safetensors")
    shapes = {name: tuple(each.shape) for name, each in original.items()}
    assert shapes == model_shapes(config).tensors
    for written in (tmp_path / "exported", pushed):
        assert json.loads((written / "config.json").read_text())["dtype"] == dtype
        got = load_file(written / "model.safetensors")
        assert {name: tuple(each.shape) for name, each in got.items()} == shapes
        for name, each in got.items():
            if name.endswith("e_score_correction_bias"):
                assert each.abs().min() > 0
                assert torch.equal(each, original[name])
            else:
                assert each.dtype == DTYPES[dtype]
        if dtype == "float32":
            assert_loads_as(policy, written)


@pytest.mark.parametrize("folder", EMBEDDED, indirect=True)
def test_an_embedded_engine_serves_the_pushed_weights_log_prob_for_log_prob(folder: Path, ranks: Ranks):
    policy = changed(folder, ranks)
    tensors = gather_all(policy.model, policy.weight_format, torch.float32, ranks)

    async def scenario():
        engine = EmbeddedEngine.load(ModelConfig(str(folder)), EngineConfig(slots=2, max_length=64), initial_version=0)
        assert engine.expected == policy.weight_format.shapes
        old = await engine.generate(PROMPT, Sampling(1.0, 20), (), "old")
        await engine.update_weights(1, tensors)
        new = await engine.generate(PROMPT, Sampling(1.0, 20), (), "new")
        await engine.close()
        return old, new

    old, new = asyncio.run(scenario())
    assert set(new.versions) == {1}
    ours = logprobs(policy, np.concatenate([PROMPT, new.tokens]))[len(PROMPT) :]
    np.testing.assert_allclose(new.logprobs, ours, atol=1e-4)
    stale = logprobs(policy, np.concatenate([PROMPT, old.tokens]))[len(PROMPT) :]
    assert np.abs(old.logprobs - stale).max() > 0.1
    assert_exact({0: AutoModelForCausalLM.from_pretrained(folder).eval()}, PROMPT, old, 1.0)
