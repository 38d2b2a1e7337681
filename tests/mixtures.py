"""Tiny mixtures of experts. Transformers stacks their experts in memory, and takes them apart in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "initializer_range": 0.25,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
_BIASED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
MIXTURES: dict[str, Any] = {
    "qwen3_moe": lambda **more: Qwen3MoeConfig(
        **{**_SIZES, **_GROUPED, "num_experts": 4, "moe_intermediate_size": 24, **more}
    ),
    "mixtral": lambda **more: MixtralConfig(**{**_SIZES, **_GROUPED, "num_local_experts": 4, **more}),
    "glm4_moe": lambda **more: Glm4MoeConfig(**{**_SIZES, **_GROUPED, **_BIASED, **more}),
    "deepseek_v3": lambda **more: DeepseekV3Config(**{**_SIZES, **_LATENT, **_BIASED, **more}),
}
FAMILIES: dict[str, Any] = MIXTURES | {
    "olmoe": lambda **more: OlmoeConfig(**{**_SIZES, "num_experts": 4, **more}),
    "gpt_oss": lambda **more: GptOssConfig(
        **{**_SIZES, **_GROUPED, "num_local_experts": 4, "sliding_window": 8, "rope_parameters": _PLAIN_ROPE, **more}
    ),
}
"""Also those that only tests of the learner's experts and routers take."""
BIASED = ("glm4_moe", "deepseek_v3")
"""The families whose routers have a persistent buffer, `e_score_correction_bias`."""


def mixture(family: str, seed: int = 0, **more: Any) -> Any:
    """A model of 2 layers and 4 experts. Its routers' buffers, if it has any, are not zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**more), dtype=torch.float32).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape))
    return model


def save_mixture(folder: Path, family: str, seed: int = 0, **more: Any) -> Path:
    mixture(family, seed, **more).save_pretrained(folder)
    return folder
