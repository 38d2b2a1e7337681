"""What is known of the policy without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.schema import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """`parameters` are named as in `named_parameters()`, tied ones once; `vocabulary` counts token ids."""

    parameters: Mapping[str, tuple[int, ...]]
    vocabulary: int


def model_shapes(model: ModelConfig) -> ModelShapes:
    """What learner and engines must agree on for the model that `model` names; none of its weights are read."""
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    shapes = {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}
    return ModelShapes(shapes, int(config.get_text_config().vocab_size))
