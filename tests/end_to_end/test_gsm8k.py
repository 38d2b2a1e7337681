"""The same loop on GSM8K: the excerpt of published problems, a tiny model with random weights, three steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.data.gsm8k import convert
from asyncrl.demo.tokenizer import build_tokenizer
from tests.end_to_end.support import Run

pytestmark = pytest.mark.long

EXCERPT = Path(__file__).parents[1] / "data" / "gsm8k"


def make_model(folder: Path) -> Path:
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_three_steps_on_gsm8k_with_a_tiny_model(tmp_path: Path, start: Callable[..., Run]) -> None:
    convert(EXCERPT, tmp_path / "gsm8k.parquet", "train")
    run = start(
        "train",
        "experiment=gsm8k_calculator",
        f"model.path={make_model(tmp_path / 'model')}",
        f"data.train={tmp_path / 'gsm8k.parquet'}",
        "model.dtype=float32",
        "actor.max_turn_tokens=24",
        "learner.batch_size=8",
        "learner.group_size=4",
        "learner.steps=3",
    )
    run.finish()
    assert [line["step"] for line in run.steps()] == [0, 1, 2]
    assert (run.dir / "model" / "model.safetensors").exists()
