"""Deals the processes of a role to the nodes of its pool, in proportion to the GPUs or CPUs of the nodes."""

from __future__ import annotations

from collections.abc import Sequence


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Deal `total` processes to nodes. First each node gets one process, in descending order of the weights. Each
    further process goes to the node with the largest weight / (count + 1), which is D'Hondt's method. A larger `total`
    never takes a process from a node. A node of weight 0 gets a second process only if all weights are 0.

    If all `weights` are at least 1 and `total` is their sum, each node gets its weight.
    """
    counts = [0] * len(weights)
    for _ in range(total):
        # `max` returns the first of equal nodes.
        counts[max(range(len(counts)), key=lambda node: claim(counts[node], weights[node]))] += 1
    return counts


def claim(count: int, weight: int) -> tuple[bool, float, int]:
    """Return the claim of a node with `count` processes to the next process: the node with the largest claim gets it.

    Sorting processes by the claims that won them, the largest first, gives the order in which they were dealt. If one
    more process is dealt, it comes last in this order.
    """
    return count == 0, weight / (count + 1), -count
