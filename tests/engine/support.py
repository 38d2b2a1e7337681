"""Tiny models, and the plain forward pass that an engine is held against."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from asyncrl.engine.base import Generation
from asyncrl.modelling.weight_format import WeightFormat, model_tensors
from asyncrl.weights.canary import Canary, CanaryCheck, canary_tokens

VOCABULARY = 61
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, Any] = {
    "qwen3": lambda **extra: Qwen3Config(**{**_SIZES, "head_dim": 16, **extra}),
    "qwen2": lambda **extra: Qwen2Config(**{**_SIZES, **extra}),
    "llama": lambda **extra: LlamaConfig(**{**_SIZES, "tie_word_embeddings": False, **extra}),
}


def tiny_model(seed: int = 0, family: str = "qwen3", **extra: Any) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[family](**extra)).eval()


def parameters(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the weights as they are published."""
    weights, own = WeightFormat(model), model_tensors(model)
    tensors: dict[str, torch.Tensor] = {}
    for part in weights.parts:
        tensors |= weights.publish(part, {name: own[name] for name in part.model})
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def prompt(rng: np.random.Generator, length: int) -> NDArray[np.int32]:
    return rng.integers(0, VOCABULARY, length).astype(np.int32)


def plain_logprobs(model: Any, tokens: NDArray[np.int32], temperature: float) -> NDArray[np.float32]:
    """The log-prob of every token but the first given those before it: float32[T - 1]."""
    ids = torch.tensor(tokens, dtype=torch.long, device=model.device)[None]
    with torch.no_grad():
        logprobs = (model(ids).logits[0, :-1].float() / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()


def assert_exact(models: dict[int, Any], start: NDArray[np.int32], got: Generation, temperature: float) -> float:
    """Every log-prob in `got` is the plain one under the version recorded for its token, within 1e-4; the largest
    difference."""
    whole, largest = np.concatenate([start, got.tokens]), 0.0
    for version in np.unique(got.versions):
        expected = plain_logprobs(models[int(version)], whole, temperature)[len(start) - 1 :]
        of_version = got.versions == version
        np.testing.assert_allclose(got.logprobs[of_version], expected[of_version], atol=1e-4)
        largest = max(largest, float(np.abs(got.logprobs - expected)[of_version].max()))
    return largest


def canary_check(model: Any, version: int, route: str = "zmq") -> CanaryCheck:
    """The check that an engine must pass if it got `model` as `version`."""
    tokens = canary_tokens(0, model.config.get_text_config().vocab_size)
    logprobs = plain_logprobs(model, np.array(tokens, np.int32), 1.0)
    return CanaryCheck(version, Canary(tokens, tuple(logprobs.tolist()), str(model.dtype)[6:]), route)


def swapped_layers(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with layers 0 and 1 in each other's place."""
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    renamed = re.compile("|".join(map(re.escape, other)))
    return {renamed.sub(lambda found: other[found.group()], name): tensor for name, tensor in tensors.items()}
