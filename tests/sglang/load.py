"""Episodes at work on a fleet, whatever becomes of its servers meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from asyncrl.actor.engine.base import Generation
from asyncrl.actor.engine.fleet.fleet import Fleet
from asyncrl.types import Sampling
from tests.sglang.support import prompts

Taken = tuple[Any, Generation, int]
"""What was continued, what came, and the version that was served when it was asked for."""


async def episode(fleet: Fleet, name: str, start: np.ndarray[Any, Any], turns: int = 3) -> list[Taken]:
    """Turns of one session, each of which continues all before it."""
    taken = []
    tokens = start
    for _ in range(turns):
        asked_at = fleet.version
        got = await fleet.generate(tokens, Sampling(1.0, 150), (), name)
        taken.append((tokens, got, asked_at))
        tokens = np.concatenate([tokens, got.tokens, start[:3]])
    fleet.release(name)
    return taken


async def load(fleet: Fleet, stop: asyncio.Event, episodes: int) -> AsyncIterator[Taken]:
    """`episodes` at once until `stop`; every one that was begun is finished."""
    taken: list[Taken] = []

    async def work(index: int, start: np.ndarray[Any, Any]) -> None:
        count = 0
        while not stop.is_set():
            taken.extend(await episode(fleet, f"e{index}.{count}", start))
            count += 1

    await asyncio.gather(*(work(index, start) for index, start in enumerate(prompts(episodes))))
    for each in taken:
        yield each


def some(taken: list[Taken], count: int = 40) -> list[Taken]:
    """About `count` of them, spread over all pushes."""
    return taken[:: max(1, len(taken) // count)]
