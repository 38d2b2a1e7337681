"""A split into steps and a function of step rewards for test runs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from asyncrl.types import Task, Trajectory

LENGTH = 4


def every_fourth(pieces: Sequence[str]) -> list[int]:
    """A step begins with every fourth token."""
    return list(range(0, len(pieces), LENGTH))


async def steps(task: Task, trajectory: Trajectory, texts: list[str]) -> list[float]:
    """The number of each step: the first step of the group's first member gets 1, its last step gets 0.5 more, and all
    other steps get 0. One episode in ten fails."""
    assert task.truth_text
    if fails(trajectory.id):
        raise LookupError("this one cannot be rewarded")
    return numbers(trajectory.member, len(texts))


def numbers(member: int, count: int) -> list[float]:
    found = [0.0] * count
    if member == 0:
        found[0] = 1.0
        found[-1] += 0.5
    return found


def fails(name: str) -> bool:
    return zlib.crc32(name.encode()) % 10 == 0
