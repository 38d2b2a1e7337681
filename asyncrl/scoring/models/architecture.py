"""What scoring must know of an architecture: its longest input, and whether padding or later tokens change a score."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.modelling.attention import longest_plain

_PADDED = {
    *("bert", "distilbert", "roberta", "xlm-roberta", "electra", "albert", "deberta-v2", "modernbert"),
    *("gpt2", "gpt_neox", "opt", "bloom"),
}
_NOISE, _HALF_NOISE = 1e-4, 0.02
"""The share of hidden states or logits that rounding may change, in float32 and in half precision."""


def longest_input(model: Any) -> int:
    """The most tokens that the model was made for; sys.maxsize if its configuration does not say."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa and models like it begin to count after the position of the padding.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limit = module.num_embeddings - module.padding_idx - 1
    return limit if isinstance(limit, int) and limit > 0 else sys.maxsize


def classifies_padded(model: Any) -> bool:
    """Whether the scores of a sequence classifier are known not to change with padding on the right.

    They do not change in models that read the last token of the input, and in encoders that mask the padding. Other
    models convolve or mix over the padding, or read the last position.
    """
    from transformers.modeling_layers import GenericForSequenceClassification

    known = isinstance(model, GenericForSequenceClassification) or model.config.model_type in _PADDED
    return known and longest_plain(model.config) == sys.maxsize


@torch.inference_mode()
def is_causal(backbone: Any) -> bool:
    """Whether hidden states do not depend on later tokens, tried out on one short input with two endings."""
    tokens = torch.tensor([[3, 4, 5, 6], [3, 4, 5, 7]], device=backbone.device)
    one, other = (backbone(input_ids=each[None]).last_hidden_state[0, :3].float() for each in tokens)
    return _same(one, other, backbone.dtype)


@torch.inference_mode()
def logits_are_the_heads(model: Any) -> bool:
    """Whether a causal language model's logits are those of its head, neither scaled nor capped."""
    tokens = torch.tensor([[3, 4, 5, 6]], device=model.device)
    head = model.get_output_embeddings()(model.base_model(input_ids=tokens).last_hidden_state)
    return _same(head.float(), model(input_ids=tokens).logits.float(), model.dtype)


def _same(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    return bool((one - other).norm() <= (_NOISE if dtype == torch.float32 else _HALF_NOISE) * one.norm())
