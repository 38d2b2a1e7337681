"""Groups inputs into forward passes, and finds prefixes that several inputs share, to compute each prefix once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

Shared = tuple[int, list[int]]
"""The length of a common prefix in tokens, and the indices of the inputs that have it."""


def pass_cost(device: str) -> int:
    """The cost of starting a forward pass, as the number of tokens that the device could compute in that time.

    On a GPU the shortest pass of a 7B model takes about 20 ms (benchmarks/scoring.py).
    """
    return 32 if device == "cpu" else 1024


def micro_batches(
    lengths: Sequence[int], max_tokens: int, pass_cost: int, max_inputs: int | None = None
) -> list[list[int]]:
    """Divide the indices of all inputs into batches of at most `max_tokens` tokens, including padding, and of at most
    `max_inputs` inputs (None: no limit). An input longer than `max_tokens` is a batch of its own.

    The inputs are sorted by length, and the sorted list is cut in the cheapest way. A batch costs its tokens, including
    padding, plus `pass_cost`.
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
    """Divide the indices of all inputs into sets of inputs with a common prefix. All inputs without a common prefix
    form one set, with prefix length 0.

    `ids[i]` are the tokens that input i may share. A set of n inputs with a common prefix of p tokens saves (n - 1) * p
    tokens and costs `pass_cost`. The inputs are sorted, so that inputs with a common prefix are neighbours, and the
    sorted list is cut in the way that saves most.
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
    """The cheapest way to cut `count` items into runs [begin, end). `costs(end)` yields the costs of the runs of 1, 2,
    ... items that end at `end`, up to the longest allowed run."""
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
