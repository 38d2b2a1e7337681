"""Computes causal attention of one sequence, and its gradients, in plain torch on any device. In most cases it takes
one block of queries after another (see `BLOCK`).

This attention has two options that torch's kernels lack. A soft cap c replaces a score s by c * tanh(s / c). A sink is
an additional score of a head, which takes its share of the softmax and adds nothing to the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""The number of queries in a block. Blocks are used in the backward pass. In the forward pass they are used if
attention has a cap or sinks, if a window hides keys, or if there are more keys than queries."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""The gradients with respect to query, key and value."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRule:
    """Says how scores are computed from the products of query and key.

    - `scaling`: the factor by which products are scaled (None: D ** -0.5)
    - `window`: how many of the latest keys a query sees at most (None: all)
    - `softcap`: the cap of the scaled scores (None: no cap)
    - `sinks` [heads]: the sink of each head (None: no sinks)
    """

    scaling: float | None
    window: int | None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_usual(self) -> bool:
        """True if torch's kernels support the rule."""
        return self.softcap is None and self.sinks is None


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> Tensor:
    """Compute attention [Q, heads, D] of query [Q, heads, D] over key and value [K, kv heads, D].

    The queries belong to the same tokens as the last Q keys.
    """
    if not rule.is_usual:
        blocks = _Blocks.of(query, key, value, rule)
        rows = torch.cat([blocks.shares(*each)[0] @ blocks.value[:, _slice(each[1])] for each in blocks], 1)
        return rows.transpose(0, 1).to(query.dtype)
    queries, keys, gqa = len(query), len(key), query.shape[1] != key.shape[1]
    window, scaling = rule.window, rule.scaling
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    if queries == keys and (window is None or keys <= window):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=gqa)
        return output[0].transpose(0, 1)
    outputs = []
    # Masked keys cost as much as visible keys, so each block gets only the keys that it may see.
    for block, seen in _blocks(queries, keys, window):
        rows, others = q[:, :, block.start - keys + queries : block.stop - keys + queries], _slice(seen)
        mask = ~_hidden(block, seen, window, query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                rows, k[:, :, others], v[:, :, others], attn_mask=mask, scale=scaling, enable_gqa=gqa
            )
        )
    return torch.cat(outputs, 2)[0].transpose(0, 1)


def differentiate_plainly(
    of_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rule: ScoreRule
) -> tuple[Gradients, Tensor | None]:
    """Compute the gradients with respect to query, key, value and sinks (None without sinks).

    `of_output` is the gradient with respect to the output of `attend_plainly`. The softmax is computed again.
    """
    blocks = _Blocks.of(query, key, value, rule)
    q, k, v = blocks.query, blocks.key, blocks.value
    of_rows, rows = (each.to(q.dtype).transpose(0, 1) for each in (of_output, output))
    shift = (of_rows * rows).sum(-1, keepdim=True)
    of_query, of_key, of_value = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    of_sinks = None if rule.sinks is None else q.new_zeros(len(q))
    for block, seen in blocks:
        queries, keys = blocks.rows(block), _slice(seen)
        shares, slope, sunk = blocks.shares(block, seen)
        of_scores = shares * (of_rows[:, queries] @ v[:, keys].mT - shift[:, queries]) * blocks.scale
        if slope is not None:
            of_scores *= slope
        if of_sinks is not None and sunk is not None:
            of_sinks -= (sunk * shift[:, queries]).sum((1, 2))
        of_query[:, queries] = of_scores @ k[:, keys]
        of_key[:, keys] += of_scores.mT @ q[:, queries]
        of_value[:, keys] += shares.mT @ of_rows[:, queries]
    of_key, of_value = (each.unflatten(0, (key.shape[1], -1)).sum(1) for each in (of_key, of_value))
    of_query, of_key, of_value = (each.transpose(0, 1).to(query.dtype) for each in (of_query, of_key, of_value))
    return (of_query, of_key, of_value), of_sinks


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """query [heads, Q, D], key and value [heads, K, D] of one sequence in float32 or better. Iteration yields blocks of
    queries, and the keys that they see."""

    query: Tensor
    key: Tensor
    value: Tensor
    rule: ScoreRule
    scale: float

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule) -> _Blocks:
        wide, groups = torch.promote_types(query.dtype, torch.float32), query.shape[1] // key.shape[1]
        k, v = (each.to(wide).transpose(0, 1).repeat_interleave(groups, 0) for each in (key, value))
        scale = query.shape[2] ** -0.5 if rule.scaling is None else rule.scaling
        return cls(query.to(wide).transpose(0, 1), k, v, rule, scale)

    def __iter__(self) -> Iterator[tuple[range, range]]:
        return _blocks(self.query.shape[1], self.key.shape[1], self.rule.window)

    def rows(self, block: range) -> slice:
        """The rows that the queries at these positions have in `query`."""
        ahead = self.key.shape[1] - self.query.shape[1]
        return slice(block.start - ahead, block.stop - ahead)

    def shares(self, block: range, seen: range) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute the softmax [heads, queries, keys].

        Also returns the derivative of the capped scores with respect to the uncapped ones (None without a cap), and the
        sinks' part of the softmax [heads, queries, 1] (None without sinks).
        """
        cap, sinks, slope, sunk = self.rule.softcap, self.rule.sinks, None, None
        scores = self.query[:, self.rows(block)] @ self.key[:, _slice(seen)].mT * self.scale
        if cap is not None:
            unit = (scores / cap).tanh()
            scores, slope = cap * unit, 1 - unit**2
        scores = scores.masked_fill(_hidden(block, seen, self.rule.window, scores.device), -torch.inf)
        if sinks is None:
            return scores.softmax(-1), slope, None
        columns = sinks.to(scores.dtype)[:, None, None].expand(-1, len(block), 1)
        shares, sunk = torch.cat([scores, columns], -1).softmax(-1).split([len(seen), 1], -1)
        return shares, slope, sunk


def _slice(positions: range) -> slice:
    return slice(positions.start, positions.stop)


def _blocks(queries: int, keys: int, window: int | None) -> Iterator[tuple[range, range]]:
    """Yield the positions of up to `BLOCK` queries, and of all keys that they see, block by block."""
    for start in range(keys - queries, keys, BLOCK):
        stop = min(start + BLOCK, keys)
        yield range(start, stop), range(0 if window is None else max(0, start - window + 1), stop)


def _hidden(queries: range, keys: range, window: int | None, device: torch.device) -> Tensor:
    """A mask bool[queries, keys] that is true for keys that a query must not see."""
    distance = torch.arange(queries.start, queries.stop, device=device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=device)
    return (distance < 0) | (distance >= (queries.stop if window is None else window))
