"""Tiny random models of the families that servers are fed with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.modelling.weight_format import model_tensors
from tests.episode.fakes import make_tokenizer

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE: dict[str, Any] = {"head_dim": 32}
_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}
"""The settings of DeepSeek's own models; SGLang on the CPU computes their rotary embeddings in no other way."""
_SOFTMAX: dict[str, Any] = {"moe_layer_freq": 1, "topk_method": "greedy", "scoring_func": "softmax"}
_SIGMOID: dict[str, Any] = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _ROUTED | _LATENT | _YARN | _SIGMOID,
    "mixtral": _LOCAL,
    "qwen3_moe": _WIDE | _EXPERTS,
    "glm4_moe": _WIDE | _ROUTED,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "minimax_m2": _WIDE | _LOCAL | {"scoring_func": "sigmoid", "use_qk_norm": True, "rotary_dim": 16},
    "deepseek_v2": _ROUTED | _LATENT | _YARN | _SOFTMAX,
    "gpt_oss": _WIDE | _LOCAL | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "qwen3": _WIDE,
    "qwen3 tied": _WIDE | _TIED,
    "qwen2": {},
    "qwen2 tied": _TIED,
    "llama": {},
    "llama tied": _TIED,
    "mistral": _WIDE | {"sliding_window": None},
    "gemma2": _WIDE | {"hidden_act": "gelu_pytorch_tanh", "attn_logit_softcapping": 1e4},
    "gemma3_text": _WIDE | {"num_hidden_layers": 6},
    "phi3": {},
    "glm4": _WIDE,
    "olmo2": {},
    "smollm3": {"num_hidden_layers": 4},
    "ernie4_5": _WIDE,
    "seed_oss": _WIDE,
}
"""Sizes beyond those that all have. The first word is the `model_type` of transformers, others tell variants apart."""


def family_config(family: str) -> Any:
    sizes = _SIZES | {"vocab_size": len(make_tokenizer())} | FAMILIES[family]
    return AutoConfig.for_model(family.split()[0], **sizes)


def family_model(family: str, seed: int) -> Any:
    """A model none of whose tensors equals that of another seed: not even norms and biases, which start as 1 and 0."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(family_config(family), dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in model_tensors(model).items():
            # A buffer may only choose experts, and small changes choose the same ones.
            tensor.add_(torch.randn(tensor.shape), alpha=0.1 if name in parameters else 1.0)
    return model
