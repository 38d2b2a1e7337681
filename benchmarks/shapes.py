"""Makes Qwen3 and Qwen3-MoE models with random weights, for benchmarks that need only a size.

`python -m benchmarks.shapes 0.6B FOLDER` writes a Hugging Face folder without a tokenizer, which a server loads with
--skip-tokenizer-init. The model has no end token, so no answer ends early. `--tokenizer` also writes a tokenizer for
episodes, which then end early if a turn happens to sample the end token.
"""

from __future__ import annotations

import argparse
import itertools
import math
import string
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Shape(NamedTuple):
    """Sizes of a model. Heads are 64 wide if there are up to 12, else 128. A mixture has `experts` experts in each
    layer, each `intermediate` wide, of which `active` compute a token."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    heads: int
    kv_heads: int
    experts: int = 0
    active: int = 0


SHAPES = {
    "tiny": Shape(128, 384, 4, 4096, 4, 2),
    "2.5M": Shape(256, 512, 4, 512, 4, 2),
    "30M": Shape(512, 1536, 6, 16384, 8, 4),
    "120M": Shape(768, 3072, 10, 32768, 12, 4),
    "135M": Shape(576, 1536, 30, 49152, 9, 3),
    "0.6B": Shape(1024, 3072, 28, 151936, 16, 8),
    "4B": Shape(2560, 9728, 36, 151936, 32, 8),
    "tiny-moe": Shape(128, 64, 4, 4096, 4, 2, 16, 4),
    # The widths of Qwen3-30B-A3B. It has 48 layers; with 8 a step of AdamW fits a GPU of 141 GB.
    "30B-A3B-8-layers": Shape(2048, 768, 8, 151936, 32, 4, 128, 8),
}


LARGER, CHANNEL, SETTLED, CORRECTIONS = 20.0, 10.0, 32, 4
"""The constants of `end_turns`: the factor of embeddings, the value of their first channel, the first position that
counts, and the number of corrections."""


def make_model(shape: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Make a model of that shape with transformers' initialisation, or without contents on the meta device. The head of
    a mixture of experts is not tied, as in Qwen's."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(0)
    sizes = SHAPES[shape]
    common: dict[str, Any] = {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "vocab_size": sizes.vocabulary,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": 128 if sizes.heads > 12 else 64,
    }
    config: Any = Qwen3Config(**common, intermediate_size=sizes.intermediate, tie_word_embeddings=True)
    if sizes.experts:
        common |= {"num_experts": sizes.experts, "num_experts_per_tok": sizes.active, "norm_topk_prob": True}
        config = Qwen3MoeConfig(**common, moe_intermediate_size=sizes.intermediate)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def end_turns(model: Any, end: int, mean: float) -> None:
    """Change a dense model with random weights so that it samples the token `end` with the probability 1 / `mean`.

    All embeddings get the same value in the first channel, to which no layer adds anything. So the final hidden states
    share it. The head has the embeddings' weights: a larger first channel of `end` raises its logit at each position.
    """
    # An update adds about as much to a channel in any model. Compared with large embeddings it is little, so training
    # hardly changes the probability. The final norm undoes the factor.
    embeddings = model.get_input_embeddings().weight.data.mul_(LARGER)
    model.model.norm.weight.data.div_(LARGER)
    embeddings[:, 0] = CHANNEL
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[0] = 0
        layer.mlp.down_proj.weight.data[0] = 0
    tokens = torch.randint(len(embeddings), (8, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = model.model(input_ids=tokens.to(embeddings.device), use_cache=False).last_hidden_state
    hidden = hidden[:, SETTLED:].flatten(0, 1).float()
    for _ in range(CORRECTIONS):
        share = (hidden @ embeddings.float().T).softmax(-1)[:, end].mean().item()
        # The difference of log-odds is the missing part of the logit.
        embeddings[end, 0] -= math.log(share * (mean - 1) / (1 - share)) / hidden[:, 0].mean().item()


def word_tokenizer(vocabulary: int) -> Any:
    """Make a tokenizer of that many tokens for random text: the demo's tokens, and words of four letters that no text
    encodes to. So sampled tokens have text of a usual length, and a prompt has one token for each letter. The chat
    template has Qwen's form."""
    import json

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from asyncrl.commands.demo.tokenizer import CHAT_TEMPLATE, END_OF_TURN, build_tokenizer

    own = json.loads(build_tokenizer().backend_tokenizer.to_str())
    words = itertools.product(string.ascii_lowercase, repeat=4)
    added = vocabulary - len(own["added_tokens"])
    own["model"]["vocab"] |= {"Ġ" + "".join(next(words)): id for id in range(len(own["model"]["vocab"]), added)}
    for id, token in enumerate(own["added_tokens"], added):
        token["id"] = id
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(own)),
        eos_token=END_OF_TURN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help="device that draws the weights: cuda is faster")
    parser.add_argument("--tokenizer", action="store_true", help="also write a tokenizer and a chat template")
    options = parser.parse_args()
    make_model(options.shape, torch.bfloat16, options.device).save_pretrained(options.folder)
    if options.tokenizer:
        word_tokenizer(SHAPES[options.shape].vocabulary).save_pretrained(options.folder)


if __name__ == "__main__":
    main()
