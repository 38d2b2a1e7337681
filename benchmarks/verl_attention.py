"""flash-attn's functions over the same kernels in PyTorch, for machines for which there is no wheel of flash-attn.

verl's trainer needs flash-attn to pack sequences without padding. benchmarks.versus_verl gives verl's processes a
package with that name, which has these functions, if their Python lacks it. `verl_settings` writes the package.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

flash_attn_with_kvcache = None
"""transformers imports the name. Training calls no such function."""


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """The attention of packed sequences. `q` has the shape [tokens, heads, width]; the sequences end at the tokens
    `cu_seqlens_q[1:]` and `cu_seqlens_k[1:]`."""
    lengths = int(max_seqlen_q), int(max_seqlen_k)
    ends = (each.to(torch.int32) for each in (cu_seqlens_q, cu_seqlens_k))
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, *ends, *lengths, dropout_p, causal, False, scale=softmax_scale
    )
    output: Tensor = found[0]
    return output


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """The attention of sequences of equal length. `q` has the shape [batch, tokens, heads, width]."""
    query, key, value = (each.transpose(1, 2) for each in (q, k, v))
    output = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return output.transpose(1, 2)
