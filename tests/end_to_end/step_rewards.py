"""A split into steps, a function of step rewards and an agent that rewards its turns, for test runs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import aiohttp

from asyncrl.agents import AgentResult
from asyncrl.types import Task, Trajectory

LENGTH = 4
TURNS = [1.0, None, 0.25]
"""The rewards of the agent's turns."""


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


async def three_turns(task: Task, base_url: str, api_key: str) -> AgentResult:
    """Takes three turns, and rewards the first and the last one."""
    messages = list(task.messages)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        for _ in TURNS:
            async with session.post(f"{base_url}/chat/completions", json={"messages": messages}) as response:
                response.raise_for_status()
                messages += [(await response.json())["choices"][0]["message"], {"role": "user", "content": "+1"}]
    return AgentResult(turns=TURNS)


def fails(name: str) -> bool:
    return zlib.crc32(name.encode()) % 10 == 0
