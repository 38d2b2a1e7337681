"""Which inputs go into one forward pass, and which of them begin alike, so that their beginning is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Shared = tuple[int, list[int]]
"""A number of tokens that inputs have in common at their beginning, and the inputs."""


def pass_cost(device: str) -> int:
    """The tokens that could be computed while a forward pass starts, by the type of the device.

    On a GPU a pass of a 7B model takes about 20 ms however few its tokens (benchmarks/scoring.py).
    """
    return 32 if device == "cpu" else 1024


def micro_batches(lengths: Sequence[int], max_tokens: int, pass_cost: int) -> list[list[int]]:
    """Every index once, in batches of at most `max_tokens` tokens when padded to their longest; one that is longer by
    itself is a batch of its own.

    Of all splits of the inputs sorted by length it is the one of least cost, where a batch costs its tokens, padding
    included, and `pass_cost`.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    costs, begins = [0], [0]
    for end in range(1, len(order) + 1):
        least, choice = costs[end - 1] + lengths[order[end - 1]] + pass_cost, end - 1
        for begin in range(end - 2, -1, -1):
            tokens = lengths[order[begin]] * (end - begin)
            if tokens > max_tokens:
                break
            if costs[begin] + tokens + pass_cost < least:
                least, choice = costs[begin] + tokens + pass_cost, begin
        costs.append(least)
        begins.append(choice)
    batches, end = [], len(order)
    while end:
        batches.append(order[begins[end] : end])
        end = begins[end]
    return batches[::-1]


def share_prefixes(ids: Sequence[Sequence[int]], pass_cost: int) -> list[Shared]:
    """Every index once, in sets that save many tokens; those that share nothing are one set of prefix 0.

    `ids` are the tokens that an input may share. A set of n inputs with a common prefix of p tokens saves (n - 1) * p
    tokens and costs `pass_cost`. Sorted, inputs that begin alike are neighbours; of all splits into sets of neighbours
    this is the one that saves most.
    """
    order = sorted(range(len(ids)), key=lambda index: list(ids[index]))
    common = [_common(ids[first], ids[second]) for first, second in pairwise(order)]
    saved, best = [0], [(0, 0)]
    for end in range(1, len(order) + 1):
        gain, choice = saved[end - 1], (end - 1, 0)
        prefix = len(ids[order[end - 1]])
        for begin in range(end - 2, -1, -1):
            prefix = min(prefix, common[begin])
            if prefix == 0:
                break
            candidate = saved[begin] + (end - begin - 1) * prefix - pass_cost
            if candidate > gain:
                gain, choice = candidate, (begin, prefix)
        saved.append(gain)
        best.append(choice)
    return _sets(order, best)


def _sets(order: Sequence[int], best: Sequence[tuple[int, int]]) -> list[Shared]:
    sets: list[Shared] = []
    alone: list[int] = []
    end = len(order)
    while end:
        begin, prefix = best[end]
        if prefix:
            sets.append((prefix, list(order[begin:end])))
        else:
            alone += order[begin:end]
        end = begin
    return [*sets, (0, alone)] if alone else sets


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    length = min(len(first), len(second))
    return next((index for index in range(length) if first[index] != second[index]), length)
