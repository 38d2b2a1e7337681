"""Log-probs and entropies of tokens from hidden states, without keeping logits [N, V]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 1 << 26
"""Logits that exist at once: 256 MiB in float32."""

Head = Callable[[Tensor], Tensor]


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    vocabulary: int,
    temperature: float,
    with_entropy: bool,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs float32[M] of targets int64[M] under head(hidden [M, D]) / temperature; entropies float32[M] or None.

    Logits are computed in the dtype of `hidden`, and normalised in float32, in chunks of at most `chunk_logits`. Only
    one chunk exists at a time, and the backward pass computes it again.
    """
    rows = max(1, chunk_logits // vocabulary)
    parts = [
        checkpoint(_chunk, states, ids, head, temperature, with_entropy, use_reentrant=False, preserve_rng_state=False)
        for states, ids in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    entropy = torch.cat([part[1] for part in parts]) if with_entropy else None
    return torch.cat([part[0] for part in parts]), entropy


def _chunk(
    hidden: Tensor, targets: Tensor, head: Head, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = head(hidden).float() / temperature
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    if not with_entropy:
        return logprobs, None
    return logprobs, normaliser - (logits.softmax(-1) * logits).sum(-1)
