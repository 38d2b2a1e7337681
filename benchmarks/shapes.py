"""Qwen3 models with random weights, for benchmarks that need a size and no sense.

`python -m benchmarks.shapes 0.6B FOLDER` writes one as a Hugging Face folder without a tokenizer, which a server takes
with --skip-tokenizer-init. It names no end mark, so nothing that it samples ends early.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "vocab_size": 4096,
        "heads": (4, 2),
    },
    "30M": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "vocab_size": 16384,
        "heads": (8, 4),
    },
    "120M": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 10,
        "vocab_size": 32768,
        "heads": (12, 4),
    },
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
        "heads": (16, 8),
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "heads": (32, 8),
    },
}


def make_model(shape: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A Qwen3 of that shape with transformers' own initialisation; on the meta device, without contents."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    values = dict(SHAPES[shape])
    heads, kv_heads = values.pop("heads")
    config = Qwen3Config(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128 if heads > 12 else 64,
        tie_word_embeddings=True,
        **values,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help="where the weights are drawn: cuda is faster")
    options = parser.parse_args()
    make_model(options.shape, torch.bfloat16, options.device).save_pretrained(options.folder)


if __name__ == "__main__":
    main()
