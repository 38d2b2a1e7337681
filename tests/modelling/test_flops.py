from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config

from asyncrl.modelling.flops import ForwardFlops
from tests.mixtures import mixture

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def model_of(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_model_needs_what_its_shape_says(tied: bool):
    config = Qwen3Config(**SIZES, tie_word_embeddings=tied)
    flops = ForwardFlops.of(model_of(config), config)
    layer = 32 * 16 * (4 + 2 + 2 + 4) + 3 * 32 * 48
    assert flops.per_token == 2 * (4 * layer + 32 * 61)
    n = np.array([1, 10, 100])
    np.testing.assert_allclose(flops(n), flops.per_token * n + 4 * 4 * 4 * 16 * n * n / 2)


def test_a_window_bounds_the_pairs_of_its_layers():
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=kinds)
    flops = ForwardFlops.of(model_of(config), config)
    per_pair = 4 * 4 * 16
    assert flops.per_pair == {8: 3 * per_pair, None: per_pair}
    within, beyond = flops([8, 100]) - flops.per_token * np.array([8, 100])
    assert within == 4 * per_pair * 8 * 8 / 2
    assert beyond == 3 * per_pair * (8 * 100 - 8 * 8 / 2) + per_pair * 100 * 100 / 2


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3"])
def test_of_the_experts_those_count_that_work_on_a_token(family: str):
    model = mixture(family)
    flops = ForwardFlops.of(model, model.config)
    routed = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    others = sum(each.numel() for name, each in model.named_parameters() if each.dim() > 1 and ".experts." not in name)
    assert flops.per_token == 2 * (routed * 2 / 4 + others - model.get_input_embeddings().weight.numel())


def test_the_count_of_torch_for_a_forward_pass_has_the_masked_pairs_too():
    config = Qwen3Config(**SIZES, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(input_ids=torch.zeros(1, 20, dtype=torch.int64))
    flops = ForwardFlops.of(model, config)
    masked = flops([20]).item() - flops.per_token * 20
    # Torch counts the products with the table of rotary frequencies as well.
    assert 0 <= counter.get_total_flops() - (flops([20]).item() + masked) <= 2 * 20 * 16
