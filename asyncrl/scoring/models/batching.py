"""Which inputs go into one forward pass, and which of them begin alike, so that their beginning is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

Shared = tuple[int, list[int]]
"""A number of tokens that inputs have in common at their beginning, and the inputs."""


def micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Every index once, in batches of at most `max_tokens` tokens when padded to their longest; one that is longer by
    itself is a batch of its own. They come sorted by length, so that little is padding."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


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
