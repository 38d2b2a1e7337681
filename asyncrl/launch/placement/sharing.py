"""The numbers of processes of a role on the nodes of its pool, in proportion to what the nodes have."""

from __future__ import annotations

from collections.abc import Sequence


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Deal `total` processes to nodes: one to each, the largest first, then each to the node with most weight for a
    process more, as D'Hondt's method deals seats. With more processes no node has fewer. A node without any weight gets
    no second process, unless none has any.

    `total` is the sum of `weights` of at least 1: each node gets its weight.
    """
    counts = [0] * len(weights)
    for _ in range(total):
        # The first one of equals is the largest for `max`.
        counts[max(range(len(counts)), key=lambda node: claim(counts[node], weights[node]))] += 1
    return counts


def claim(count: int, weight: int) -> tuple[bool, float, int]:
    """The claim of a node with `count` processes to the next one, which the largest claim gets.

    Processes that are sorted by their claims are in the order of dealing: one more process only adds to its end.
    """
    return count == 0, weight / (count + 1), -count
