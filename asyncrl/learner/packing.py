"""Which rank packs which sequences into which forward pass: pure, and the same on every rank from the lengths alone.

What holds, and is tested:
- Every sequence is in exactly one pass of one rank of one minibatch; sequences are whole.
- The split into minibatches does not depend on the ranks: minibatch m holds consecutive sequences of the plan.
- All ranks have the same number of passes in a minibatch, so that their collectives meet; a pass may be empty.
- A pass has at most `micro_tokens` tokens, unless a single longer sequence has it to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Passes = list[list[int]]


def schedule(lengths: Sequence[int], ranks: int, minibatches: int, micro_tokens: int) -> list[list[Passes]]:
    """Sequence indices, ascending, by [minibatch][rank][pass]. A minibatch that would be empty is left out."""
    total = len(lengths)
    bounds = [total * m // minibatches for m in range(minibatches + 1)]
    spans = [range(start, end) for start, end in pairwise(bounds) if start < end]
    return [_minibatch(lengths, span, ranks, micro_tokens) for span in spans]


def _minibatch(lengths: Sequence[int], members: Sequence[int], ranks: int, micro_tokens: int) -> list[Passes]:
    passes = [pack(lengths, share, micro_tokens) for share in balance(lengths, members, ranks)]
    most = max(len(each) for each in passes)
    return [each + [[] for _ in range(most - len(each))] for each in passes]


def balance(lengths: Sequence[int], members: Sequence[int], parts: int) -> list[list[int]]:
    """`members` in `parts` shares of nearly equal tokens: the longest first, each to the lightest share."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for member in _longest_first(lengths, members):
        lightest = loads.index(min(loads))
        shares[lightest].append(member)
        loads[lightest] += lengths[member]
    return shares


def pack(lengths: Sequence[int], members: Sequence[int], limit: int) -> Passes:
    """`members` in few passes of at most `limit` tokens: the longest first, each to the first pass with room."""
    passes: Passes = []
    loads: list[int] = []
    for member in _longest_first(lengths, members):
        fitting = (index for index, load in enumerate(loads) if load + lengths[member] <= limit)
        index = next(fitting, len(passes))
        if index == len(passes):
            passes.append([])
            loads.append(0)
        passes[index].append(member)
        loads[index] += lengths[member]
    return [sorted(each) for each in passes]


def _longest_first(lengths: Sequence[int], members: Sequence[int]) -> list[int]:
    return sorted(members, key=lambda member: (-lengths[member], member))
