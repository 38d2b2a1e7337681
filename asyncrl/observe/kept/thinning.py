"""Chooses the step to delete from a full folder. Steps from the whole run stay, and so do all of the newest steps.

The newest steps, as many as fit into a quarter of the bytes, are never deleted. Of the older steps, the one whose
neighbours are nearest to each other is deleted. If several steps are equally good, it is the oldest.

So older steps stay evenly spread over the run, with gaps that grow with its length. The first step is deleted only if
no other step may be.
"""

from __future__ import annotations

from collections.abc import Sequence

SPARED = 0.25


def expendable(steps: Sequence[int], sizes: Sequence[int]) -> int:
    """The index of the step to delete. `steps` has at least one step, and ascends. `sizes` has the number of bytes of
    each step's file."""
    older = _older(sizes)
    # Each candidate has two neighbours. The neighbour after the last older step is the first of the newest steps.
    candidates = range(1, min(older, len(steps) - 1))
    return min(candidates, key=lambda index: steps[index + 1] - steps[index - 1], default=0)


def _older(sizes: Sequence[int]) -> int:
    """Count the older steps. The newest steps, which are not counted, have at most the share SPARED of all bytes."""
    room = sum(sizes) * SPARED
    for index in reversed(range(len(sizes))):
        room -= sizes[index]
        if room < 0:
            return index + 1
    return 0
