"""Requests that real clients sent, with the policy's turns that they answered: each makes one branch of its episode."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.types import Role
from tests.agents.chat_api.support import LIMITS, episode

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
LONG = replace(LIMITS, max_turn_tokens=1000, max_tokens=30_000, max_total_tokens=60_000)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
async def test_the_requests_of_a_real_client_make_one_branch_with_all_its_turns(path: Path) -> None:
    recorded = json.loads(path.read_text())
    async with episode(recorded["turns"], LONG) as agent:
        for request in recorded["requests"]:
            status, answer = await agent.send(path=request["path"], json=request["body"])
            assert status == 200, answer
    assert len(agent.trajectory.branches) == 1
    assert sum(turn.role is Role.ASSISTANT for turn in agent.trajectory.turns) == len(recorded["turns"])
