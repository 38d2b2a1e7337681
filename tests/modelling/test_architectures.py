"""Tiny models of many families: learner and embedded engine repeat each one's own log-probs, or refuse it at the start.

Windows, chunks and changes of the rotary embeddings lie at SHORT tokens, and LENGTH are needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.actor.engine.base import Generation
from asyncrl.actor.engine.embedded import EmbeddedEngine
from asyncrl.config.schema import EngineConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.packing import PackedSequences
from asyncrl.learner.policy import load_policy
from asyncrl.learner.ranks import Ranks, joined
from asyncrl.types import Sampling
from tests.actor.engine.support import assert_exact, plain_logprobs, prompt

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH, SHORT = 61, 24, 12
BOTH = ("learner", "engine")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "num_key_value_heads": 4}
WINDOW = {"sliding_window": SHORT}
LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 48, "num_hidden_layers": 4, "attention_chunk_size": SHORT}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": SHORT,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@dataclass(frozen=True)
class Case:
    """A model, why learner and engine refuse it at LENGTH tokens (None: they do not), and who takes it at SHORT."""

    family: str
    sizes: dict[str, Any] = field(default_factory=dict)
    learner: str | None = None
    engine: str | None = None
    short: tuple[str, ...] = BOTH
    note: str = ""

    def __str__(self) -> str:
        return f"{self.family}{'-' * bool(self.note)}{self.note}"


def refused(family: str, reason: str, *, short: tuple[str, ...] = (), note: str = "", **sizes: Any) -> Case:
    return Case(family, sizes, reason, reason, short, note)


def windowed(family: str, **sizes: Any) -> Case:
    return Case(family, {**WINDOW, **sizes}, engine=f"sliding window of {SHORT} tokens")


CONVOLVES, NO_ATTENTION, SCALED = (
    "convolves neighbouring tokens",
    "no attention that could be replaced",
    "caps or scales",
)
CASES = [
    Case("llama"),
    Case("qwen2"),
    Case("qwen3", WIDE),
    Case("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    Case("qwen3_moe", {**WIDE, **EXPERTS}),
    Case("phi"),
    Case("phi3"),
    Case("phimoe", LOCAL),
    Case("gemma", WIDE),
    Case("gpt2", GPT2),
    Case("gpt_bigcode", GPT2 | {"num_key_value_heads": 1}),
    Case("gpt_neox", {"num_key_value_heads": 4}),
    Case("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": 4}),
    Case("olmo2"),
    Case("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Case("smollm3", {"num_hidden_layers": 4}),
    Case("glm", WIDE),
    Case("glm4", WIDE),
    Case("glm4_moe", {**WIDE, **ROUTED, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    Case("minimax_m2", {**WIDE, **LOCAL}),
    Case("seed_oss", WIDE),
    Case("hunyuan_v1_dense", WIDE),
    Case("ernie4_5", WIDE),
    Case("apertus"),
    Case("arcee"),
    windowed("afmoe", **WIDE, **EXPERTS, num_dense_layers=1),
    windowed("mistral"),
    windowed("mixtral", **LOCAL),
    windowed("qwen2", use_sliding_window=True, max_window_layers=1),
    windowed("qwen3", use_sliding_window=True, max_window_layers=0, **WIDE),
    windowed("starcoder2"),
    windowed("gemma3_text", num_hidden_layers=6, **WIDE),
    windowed("olmo3", num_hidden_layers=4),
    windowed("exaone4", num_hidden_layers=4),
    Case("deepseek_v2", LATENT | ROUTED | {"first_k_dense_replace": 1}, engine="where the cache has", short=()),
    Case("diffllama", engine="attend more than once", short=()),
    refused(
        "phi3",
        "longrope or dynamic.* more than 12 tokens",
        note="longrope",
        rope_parameters=LONGROPE,
        original_max_position_embeddings=SHORT,
        short=BOTH,
    ),
    refused("qwen3", "longrope or dynamic", note="dynamic", rope_parameters=DYNAMIC, **WIDE),
    refused(
        "gemma3_text",
        "longrope or dynamic",
        note="dynamic in one kind of layers",
        rope_parameters={"full_attention": DYNAMIC, "sliding_attention": PLAIN},
        **WIDE,
    ),
    refused("llama4_text", "scales queries by their index", attn_temperature_tuning=True, **LLAMA4, **WIDE),
    refused(
        "llama4_text",
        "mask of its own.*chunked",
        note="chunks alone",
        short=("engine",),
        attn_temperature_tuning=False,
        **LLAMA4,
        **WIDE,
    ),
    refused("gemma2", "takes softcap", **WIDE),
    refused("gpt_oss", "takes s_aux", **LOCAL, **WINDOW, **WIDE),
    refused("doge", "mask of its own", keep_window_size=4),
    refused(
        "deepseek_v32",
        "takes indices",
        **LATENT,
        **ROUTED,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        index_topk=4,
        index_n_heads=2,
        index_head_dim=16,
    ),
    Case("granite", {"logits_scaling": 8.0}, learner=SCALED, short=()),
    Case("cohere", learner=SCALED, short=()),
    Case("nanochat", learner=SCALED, short=()),
    refused(
        "qwen3_next",
        CONVOLVES,
        num_hidden_layers=4,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        shared_expert_intermediate_size=24,
        **EXPERTS,
        **WIDE,
    ),
    refused("falcon_h1", CONVOLVES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1),
    refused("bamba", CONVOLVES, attn_layer_indices=[1], **MAMBA),
    refused("jamba", CONVOLVES, num_experts=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    refused(
        "granitemoehybrid", CONVOLVES, layer_types=["mamba", "attention"], shared_intermediate_size=24, **LOCAL, **MAMBA
    ),
    refused("lfm2", CONVOLVES, layer_types=["conv", "full_attention"], block_dim=32, conv_dim=32),
    refused("mamba2", CONVOLVES, num_heads=8, head_dim=8, state_size=8, n_groups=1),
    refused("recurrent_gemma", CONVOLVES, lru_width=32, attention_window_size=4, num_hidden_layers=3),
    refused("minimax", NO_ATTENTION, **LOCAL, **WIDE),
    refused("rwkv", NO_ATTENTION, attention_hidden_size=32),
    refused("bloom", NO_ATTENTION),
    refused("mpt", NO_ATTENTION, d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_short_case = pytest.mark.parametrize(
    "case", [case for case in CASES if case.short and (case.learner or case.engine)], ids=str
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with joined() as ranks:
        yield ranks


def make(case: Case) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(case.family, **{**SIZES, **case.sizes})).eval()


def assert_learner_is_exact(case: Case, folder: Path, ranks: Ranks, length: int) -> None:
    model, rng = make(case), np.random.default_rng(0)
    model.save_pretrained(folder)
    sequences = [prompt(rng, each) for each in (length, 3, length - 1)]
    policy = load_policy(ModelConfig(str(folder)), 1.0, ranks, length)
    with torch.no_grad():
        ours, _ = policy(PackedSequences.of([torch.from_numpy(each).long() for each in sequences]))
    expected = np.concatenate([np.append(0, plain_logprobs(model, each, 1.0)) for each in sequences])
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-4)


def assert_engine_is_exact(case: Case, length: int) -> None:
    rng = np.random.default_rng(0)
    prompts = [prompt(rng, each) for each in (length // 2, 3, length - 4)]

    async def main() -> list[Generation]:
        engine = EmbeddedEngine(make(case), EngineConfig(slots=2, max_length=length), initial_version=0)
        calls = [engine.generate(each, Sampling(1.0, length), (), f"{i}") for i, each in enumerate(prompts)]
        try:
            return await asyncio.gather(*calls)
        finally:
            await engine.close()

    for start, got in zip(prompts, asyncio.run(main()), strict=True):
        assert len(start) + len(got.tokens) == length
        assert_exact({0: make(case)}, start, got, 1.0)


@every_case
def test_the_learner_gives_each_models_own_log_probs_packed_or_refuses_it(case: Case, tmp_path: Path, ranks: Ranks):
    if case.learner is None:
        assert_learner_is_exact(case, tmp_path, ranks, LENGTH)
        return
    make(case).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot be trained packed.*{case.learner}"):
        load_policy(ModelConfig(str(tmp_path)), 1.0, ranks, LENGTH)


@every_case
def test_the_embedded_engine_gives_each_models_own_log_probs_or_refuses_it(case: Case):
    if case.engine is None:
        assert_engine_is_exact(case, LENGTH)
        return
    with pytest.raises(ConfigError, match=f"embedded engine cannot serve.*{case.engine}"):
        EmbeddedEngine(make(case), EngineConfig(slots=2, max_length=LENGTH))


@every_short_case
def test_a_model_that_is_refused_for_the_length_alone_is_exact_below_it(case: Case, tmp_path: Path, ranks: Ranks):
    if "learner" in case.short:
        assert_learner_is_exact(case, tmp_path, ranks, SHORT)
    if "engine" in case.short:
        assert_engine_is_exact(case, SHORT)
