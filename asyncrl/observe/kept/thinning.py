"""Chooses the step that a full folder gives up, so that all of the run stays visible, and its end stays whole.

The newest steps, a quarter of the bytes, are spared. Of the others the step goes whose neighbours are nearest to each
other, the oldest of several. So older steps stay spread evenly over the run, with gaps that grow with its length. The
first step always stays.
"""

from __future__ import annotations

from collections.abc import Sequence

SPARED = 0.25


def expendable(steps: Sequence[int], sizes: Sequence[int]) -> int:
    """The index of the step to give up, of at least one: `steps` ascend, and their files have these sizes in bytes."""
    older = _older(sizes)
    # Both neighbours of a step count, and the one after the last older step is the first of the newest.
    candidates = range(1, min(older, len(steps) - 1))
    return min(candidates, key=lambda index: steps[index + 1] - steps[index - 1], default=0)


def _older(sizes: Sequence[int]) -> int:
    """Count the steps before the newest ones."""
    room = sum(sizes) * SPARED
    for index in reversed(range(len(sizes))):
        room -= sizes[index]
        if room < 0:
            return index + 1
    return 0
