"""Groups inputs into forward passes, and finds prefixes that several inputs share and that are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Shared = tuple[int, list[int]]
"""The length of a common prefix in tokens, and the indices of the inputs that have it."""


def pass_cost(device: str) -> int:
    """The cost of starting a forward pass, in tokens that could be computed meanwhile, by the type of the device.

    On a GPU the shortest pass of a 7B model takes about 20 ms (benchmarks/scoring.py).
    """
    return 32 if device == "cpu" else 1024


def micro_batches(lengths: Sequence[int], max_tokens: int, pass_cost: int) -> list[list[int]]:
    """Every index once, in batches of at most `max_tokens` tokens including padding. A longer input is a batch of its
    own.

    The inputs are sorted by length, and of all ways to cut the sorted list this is the cheapest. A batch costs its
    tokens, including padding, plus `pass_cost`.
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
    """Every index once, in sets with a common prefix; inputs that share nothing are one set of prefix 0.

    `ids` are the tokens that an input may share. A set of n inputs with a common prefix of p tokens saves (n - 1) * p
    tokens and costs `pass_cost`. Sorting makes neighbours of inputs that begin alike. Of all ways to cut the sorted
    list this one saves most.
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
