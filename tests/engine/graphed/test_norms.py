"""Norms are fused only if the fused kernel computes the same."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config

from asyncrl.engine.graphed.norms import fuse_norms

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
IDS = torch.arange(10)[None]


def fused(config: object) -> list[str]:
    """The modules whose computation changes. Their model must give the same logits as before."""
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "norm" in name:
                each.normal_()
        before, kinds = model(IDS).logits, {name: type(each) for name, each in model.named_modules()}
        fuse_norms(model)
        torch.testing.assert_close(model(IDS).logits, before, atol=1e-4, rtol=1e-4)
    return [name for name, each in model.named_modules() if type(each) is not kinds[name]]


def test_all_norms_of_usual_families_are_fused() -> None:
    assert len(fused(LlamaConfig(**SIZES))) == 2 * 2 + 1
    assert len(fused(Qwen3Config(**SIZES))) == 2 * 4 + 1


def test_a_norm_that_adds_one_to_its_weight_stays() -> None:
    assert fused(Gemma2Config(**SIZES)) == []
