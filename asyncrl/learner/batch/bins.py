"""Heuristics that divide items into parts of equal cost or into bins of limited length. `schedule` chooses the best of
their results.

Items are indices into `lengths` and `costs`, and no item is longer than a bin's limit. An item's cost grows with its
length. "Decreasing" items are sorted by cost, the costliest first. Comparisons and sums have a fixed order, so that
every process gets the same result.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

Bins = list[list[int]]

STEPS = 50
"""The maximum number of exchanges that `even_out` makes."""
ENOUGH = 1.001
"""`even_out` stops once no bin costs more than the mean times this factor."""


def karmarkar_karp(costs: Sequence[float], items: Sequence[int], parts: int) -> Bins:
    """Divide `items` into `parts` parts of nearly equal cost.

    Each item begins as a partition that has this item in one part, and whose other parts are empty. Partitions are
    merged until one is left. Each merge takes the two partitions in which the costliest and the cheapest part differ
    most. It joins the costliest part of one partition with the cheapest part of the other, the second costliest with
    the second cheapest, and so on.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for item in items:
        partition = [(costs[item], [item]), *((0.0, []) for _ in range(parts - 1))]
        heap.append((partition[-1][0] - costs[item], len(heap), partition))
    heapq.heapify(heap)
    count = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        pairs = zip(first, reversed(second), strict=True)
        merged = sorted(((x + y, a + b) for (x, a), (y, b) in pairs), key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], count, merged))
        count += 1
    return [part for _, part in heap[0][2]]


def first_fit_decreasing(lengths: Sequence[int], items: Sequence[int], limit: int) -> Bins:
    """Put decreasing `items` into bins of length at most `limit`: each into the first bin with room for it."""
    bins: Bins = []
    rooms: list[int] = []
    for item in items:
        index = next((index for index, room in enumerate(rooms) if lengths[item] <= room), len(bins))
        if index == len(bins):
            bins.append([])
            rooms.append(limit)
        bins[index].append(item)
        rooms[index] -= lengths[item]
    return bins


def fullest_bins(lengths: Sequence[int], items: Sequence[int], limit: int) -> Bins:
    """Put decreasing `items` into bins of at most `limit`. The first remaining item opens a bin. Then the subset of the
    other remaining items that fills the bin most is put into this bin."""
    left = list(items)
    bins: Bins = []
    while left:
        first, *others = left
        room = limit - lengths[first]
        # Bit t of sums[i] is set if some subset of others[:i] has t tokens in total.
        sums = [1]
        for item in others:
            sums.append((sums[-1] | sums[-1] << lengths[item]) & ((2 << room) - 1))
        filled = sums[-1].bit_length() - 1
        chosen = [first]
        for index in reversed(range(len(others))):
            if not sums[index] >> filled & 1:
                chosen.append(others[index])
                filled -= lengths[others[index]]
        bins.append(chosen)
        left = [item for item in others if item not in chosen]
    return bins


def fill_to_targets(
    lengths: Sequence[int], costs: Sequence[float], items: Sequence[int], targets: Sequence[float], limit: int
) -> Bins | None:
    """Put decreasing `items` into bins of at most `limit`, one bin for each target cost. An item goes into the bin
    whose cost is farthest below the bin's target, among the bins that have room for the item. Returns None if an item
    fits into no bin."""
    bins: Bins = [[] for _ in targets]
    rooms = [limit] * len(targets)
    above = [(-target, index) for index, target in enumerate(targets)]
    heapq.heapify(above)
    full: list[tuple[int, int, float]] = []
    """Bins that had too little room for an item, the roomiest first."""
    for item in items:
        length = lengths[item]
        while full and -full[0][0] >= length:
            _, index, excess = heapq.heappop(full)
            heapq.heappush(above, (excess, index))
        while above and rooms[above[0][1]] < length:
            excess, index = heapq.heappop(above)
            heapq.heappush(full, (-rooms[index], index, excess))
        if not above:
            return None
        excess, index = above[0]
        bins[index].append(item)
        rooms[index] -= length
        heapq.heapreplace(above, (excess + costs[item], index))
    return bins


def even_out(lengths: Sequence[int], costs: Sequence[float], bins: Bins, limit: int) -> Bins:
    """Return the bins after exchanges that lower the largest cost. In each exchange, the costliest bin gives an item to
    a cheaper bin, or the two swap an item each.
    """
    bins = [list(each) for each in bins]
    for _ in range(STEPS):
        loads = [sum(costs[item] for item in each) for each in bins]
        order = sorted(range(len(bins)), key=lambda index: (loads[index], index))
        dearest = order.pop()
        if loads[dearest] * len(bins) <= ENOUGH * sum(loads):
            break
        if not any(_exchange(lengths, costs, bins[dearest], bins[index], limit) for index in order):
            break
    return bins


def _exchange(lengths: Sequence[int], costs: Sequence[float], dear: list[int], cheap: list[int], limit: int) -> bool:
    """Move an item, or swap an item of each bin, so that the larger of the two costs falls as much as possible. Returns
    False if it cannot fall."""
    ours, theirs = np.array([costs[item] for item in dear]), np.array([*(costs[item] for item in cheap), 0.0])
    own, other = np.array([lengths[item] for item in dear]), np.array([*(lengths[item] for item in cheap), 0])
    gap = sum(costs[item] for item in dear) - sum(costs[item] for item in cheap)
    moved, tokens = ours[:, None] - theirs, own[:, None] - other
    allowed = (own.sum() - tokens <= limit) & (other.sum() + tokens <= limit)
    gain = np.where(allowed, np.minimum(moved, gap - moved), 0)
    give, take = divmod(int(gain.argmax()), len(theirs))
    # A smaller gain may be only a rounding error.
    if not gain[give, take] > 1e-6 * gap:
        return False
    given = dear.pop(give)
    if take < len(cheap):
        dear.append(cheap.pop(take))
    cheap.append(given)
    return True
