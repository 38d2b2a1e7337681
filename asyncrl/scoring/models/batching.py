"""Groups inputs into forward passes, and finds prefixes that several inputs share and that are computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

Shared = tuple[int, list[int]]
"""The length of a common prefix in tokens, and the indices of the inputs that have it."""


def pass_cost(device: str) -> int:
    """The cost of starting a forward pass, in tokens that could be computed meanwhile, by the type of the device.

    On a GPU the shortest pass of a 7B model takes about 20 ms (benchmarks/scoring.py).
    """
    return 32 if device == "cpu" else 1024


def micro_batches(
    lengths: Sequence[int], max_tokens: int, pass_cost: int, max_inputs: int | None = None
) -> list[list[int]]:
    """Every index once, in batches of at most `max_tokens` tokens including padding, and of at most `max_inputs` inputs
    (None: no limit). A longer input is a batch of its own.

    The inputs are sorted by length, and of all ways to cut the sorted list this is the cheapest. A batch costs its
    tokens, including padding, plus `pass_cost`.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])

    def costs(end: int) -> Iterator[int]:
        for begin in range(end - 1, -1, -1):
            tokens = lengths[order[begin]] * (end - begin)
            if (tokens > max_tokens and end - begin > 1) or (max_inputs is not None and end - begin > max_inputs):
                return
            yield tokens + pass_cost

    return [order[begin:end] for begin, end in _cheapest_runs(len(order), costs)]


def share_prefixes(ids: Sequence[Sequence[int]], pass_cost: int) -> list[Shared]:
    """Every index once, in sets with a common prefix; inputs that share nothing are one set of prefix 0.

    `ids` are the tokens that an input may share. A set of n inputs with a common prefix of p tokens saves (n - 1) * p
    tokens and costs `pass_cost`. Sorting makes neighbours of inputs that begin alike. Of all ways to cut the sorted
    list this one saves most.
    """
    order = sorted(range(len(ids)), key=lambda index: list(ids[index]))
    common = [_common(ids[first], ids[second]) for first, second in pairwise(order)]

    def costs(end: int) -> Iterator[int]:
        yield 0
        prefix = len(ids[order[end - 1]])
        for begin in range(end - 2, -1, -1):
            prefix = min(prefix, common[begin])
            if prefix == 0:
                return
            yield pass_cost - (end - begin - 1) * prefix

    runs = _cheapest_runs(len(order), costs)
    alone = [order[begin] for begin, end in runs if end - begin == 1]
    sets = [(min(common[begin : end - 1]), order[begin:end]) for begin, end in runs if end - begin > 1]
    return [*sets, (0, alone)] if alone else sets


def _cheapest_runs(count: int, costs: Callable[[int], Iterable[int]]) -> list[tuple[int, int]]:
    """The cheapest way to cut `count` items into runs [begin, end). `costs(end)` gives the costs of the runs that end
    there, from one item on, as far as they are allowed."""
    totals, begins = [0], [0]
    for end in range(1, count + 1):
        choices = ((totals[end - size] + cost, size) for size, cost in enumerate(costs(end), 1))
        total, size = min(choices)
        totals.append(total)
        begins.append(end - size)
    runs, end = [], count
    while end:
        runs.append((begins[end], end))
        end = begins[end]
    return runs[::-1]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    length = min(len(first), len(second))
    return next((index for index in range(length) if first[index] != second[index]), length)
