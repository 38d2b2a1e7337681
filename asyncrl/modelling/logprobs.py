"""Computes log-probs and entropies of tokens from hidden states, without keeping logits [N, V].

Logits exist for one chunk of tokens at a time. The forward pass keeps each token's normaliser, from which the backward
pass computes the probabilities again. Let p_v be the probability of token v, and let d_v be 1 for the target and 0 for
other tokens. Then the gradients with respect to a logit z_v are

    d log p / d z_v = d_v - p_v        d entropy / d z_v = -p_v (log p_v + entropy)

each divided by the temperature. The gradient with respect to the target's logit is computed from the log-prob. In
bfloat16, 1 - p of a likely token would lose its digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from asyncrl.modelling.packed_layout import send

CHUNK_LOGITS = 1 << 26
"""The number of logits in one chunk. They take 256 MiB in float32."""
FUSED_LOGITS = 1 << 28
"""The number of logits in one chunk for compiled functions. Such functions overwrite the logits in bfloat16. The chunk
has room for 1,800 tokens with 152k logits each."""


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: nn.Linear,
    temperature: float,
    with_entropy: bool,
    compiled: bool = False,
    chunk_logits: int | None = None,
    cap: float | None = None,
    measured: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The log-probs float[M] of targets int64[M] under head(hidden [M, D]) / temperature; entropies float[M] or None.

    If `with_entropy` is false, the entropies of the tokens `measured` int64[E] (ascending, on the host) are computed
    without a gradient, and all other entropies are 0. This changes no bit of the log-probs and the gradients.

    With a `cap` the logits are capped first (see `capped`). Logits are computed in the dtype of `hidden` and normalised
    in float32 or better, in chunks of at most `chunk_logits`. The gradient of the head is summed in float32 or better.
    `compiled` fuses the operations after the logits.
    """
    limit = chunk_logits or (FUSED_LOGITS if compiled else CHUNK_LOGITS)
    rows = max(1, limit // head.out_features)
    logprobs, entropy = _HeadLogprobs.apply(
        hidden, head.weight, head.bias, targets, temperature, with_entropy, rows, compiled, cap, measured
    )
    return logprobs, entropy if with_entropy or measured is not None else None


@torch.no_grad()
def collision_probabilities(
    hidden: Tensor, head: nn.Linear, temperature: float, chunk_logits: int = CHUNK_LOGITS, cap: float | None = None
) -> Tensor:
    """The probabilities float[M] that two draws under head(hidden [M, D]) / temperature are the same token.

    Each is the sum over the vocabulary of the squared probabilities, without gradient. For the arguments see
    `token_logprobs`.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    result = hidden.new_empty(len(hidden), dtype=wide)
    for chunk in _chunks(len(hidden), max(1, chunk_logits // head.out_features)):
        scaled = capped(F.linear(hidden[chunk], head.weight, head.bias).to(wide), cap) / temperature
        result[chunk] = ((2 * scaled).logsumexp(-1) - 2 * scaled.logsumexp(-1)).exp()
    return result


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        rows: int,
        compiled: bool,
        cap: float | None,
        measured: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normalisers = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(2))
        entropies = hidden.new_zeros(len(hidden), dtype=wide)
        statistics = _compiled(_statistics) if compiled else _statistics
        divisor = _divisor(temperature, logprobs, compiled)
        samples = None if measured is None or with_entropy else _by_chunk(measured, len(hidden), rows, hidden.device)
        for chunk in _chunks(len(hidden), rows):
            logits = F.linear(hidden[chunk], weight, bias)
            logprobs[chunk], normalisers[chunk], entropy = statistics(
                logits, targets[chunk], divisor, with_entropy, cap
            )
            if entropy is not None:
                entropies[chunk] = entropy
            if samples is not None and len(sample := next(samples)):
                entropies[sample] = _entropies(logits[sample - chunk.start], normalisers[sample], temperature, cap)
        if samples is not None:
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, logprobs, normalisers, entropies)
        ctx.settings = temperature, with_entropy, rows, compiled, cap
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, logprobs, normalisers, entropies = ctx.saved_tensors
        # Entropies that are only a metric are not differentiable. Without `detach`, torch would compile one function
        # for these, and another one for differentiable entropies.
        logprobs, entropies = logprobs.detach(), entropies.detach()
        temperature, with_entropy, rows, compiled, cap = ctx.settings
        differentiate = _compiled(_gradient) if compiled else _gradient
        divisor = _divisor(temperature, logprobs, compiled)
        of_hidden = torch.empty_like(hidden)
        # A frozen head needs no gradient.
        of_weight = torch.zeros_like(weight, dtype=logprobs.dtype) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=logprobs.dtype) if ctx.needs_input_grad[2] else None
        for chunk in _chunks(len(hidden), rows):
            logits = F.linear(hidden[chunk], weight, bias)
            differentiate(
                logits,
                targets[chunk],
                logprobs[chunk],
                normalisers[chunk],
                entropies[chunk],
                of_logprobs[chunk],
                of_entropies[chunk],
                divisor,
                with_entropy,
                cap,
            )
            torch.mm(logits, weight, out=of_hidden[chunk])
            if of_weight is not None:
                _add_product(of_weight, logits, hidden[chunk])
            if of_bias is not None:
                of_bias += logits.sum(0, dtype=of_bias.dtype)
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        of_bias = None if of_bias is None else of_bias.to(weight.dtype)
        return of_hidden, of_weight, of_bias, None, None, None, None, None, None, None


def _divisor(temperature: float, logprobs: Tensor, compiled: bool) -> float | Tensor:
    """The temperature for the functions of a chunk. For compiled ones it is a tensor, so one serves all temperatures.

    The tensor is on the device of `logprobs`. For a chunk of one token, torch 2.11 passed a tensor of the host to a
    kernel of the GPU, which fails (pytorch/pytorch#196969).
    """
    return logprobs.new_full((), temperature) if compiled else temperature


def _chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def _by_chunk(measured: Tensor, count: int, rows: int, device: torch.device) -> Iterator[Tensor]:
    """The measured tokens in each chunk, on the device. There are `count` tokens in all, and `rows` in each chunk. The
    host counts the measured tokens of each chunk by itself, so it need not wait for the device."""
    starts = torch.tensor([chunk.start for chunk in _chunks(count, rows)] + [count])
    sizes = torch.searchsorted(measured, starts).diff().tolist()
    return iter(send(measured, device).split(sizes))


def _entropies(logits: Tensor, normalisers: Tensor, temperature: float, cap: float | None) -> Tensor:
    """The entropies [E] of the distributions of logits [E, V] with these normalisers [E]."""
    scaled = capped(logits.to(normalisers.dtype), cap) / temperature
    return normalisers - (scaled - normalisers[:, None]).exp_().mul_(scaled).sum(-1)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Cap logits as some models do: cap * tanh(logits / cap). Return them unchanged if `cap` is None."""
    return logits if cap is None else cap * (logits / cap).tanh()


def _statistics(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, with_entropy: bool, cap: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The log-probs of the targets, the normalisers, and with `with_entropy` the entropies; each [M]."""
    scaled = capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), cap) / temperature
    normalisers = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, targets[:, None])[:, 0] - normalisers
    entropy = None
    if with_entropy:
        entropy = normalisers - ((scaled - normalisers[:, None]).exp() * scaled).sum(-1)
    return logprobs, normalisers, entropy


def _gradient(
    logits: Tensor,
    targets: Tensor,
    logprobs: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor,
    of_entropies: Tensor,
    temperature: float | Tensor,
    with_entropy: bool,
    cap: float | None,
) -> None:
    """Overwrite logits [M, V] with their gradient."""

    def minus_expected(logs: Tensor, by: Callable[[Tensor], Tensor]) -> Tensor:
        slope = by(of_logprobs)
        if with_entropy:
            slope = slope + by(of_entropies) * (logs + by(entropies))
        return -logs.exp() * slope / temperature

    scores = capped(logits.to(normalisers.dtype), cap)
    others = minus_expected(scores / temperature - normalisers[:, None], lambda values: values[:, None])
    target = of_logprobs / temperature + minus_expected(logprobs, lambda values: values)
    if cap is not None:
        others = others * (1 - (scores / cap) ** 2)
        target = target * (1 - ((logprobs + normalisers) * temperature / cap) ** 2)
    logits.copy_(others)
    logits.scatter_(1, targets[:, None], target.to(logits.dtype)[:, None])


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function on first use: the import takes a second, and most processes on a CPU never compile."""
    return torch.compile(function, dynamic=True)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left.T @ right to `total`, summed in the dtype of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    elif left.is_cuda:
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.t().to(total.dtype), right.to(total.dtype))
