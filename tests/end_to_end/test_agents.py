"""Whole runs in which an agent from outside plays the episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import pytest

from asyncrl.commands.demo.arithmetic import opening, parse
from asyncrl.commands.demo.tool import StepCalculator
from asyncrl.commands.demo.transcripts import TOOLS
from asyncrl.replay.stored import StoredRun
from asyncrl.tools import ToolRefusal
from asyncrl.types import Role, Task
from tests.end_to_end.support import Run

Start = Callable[..., Run]


async def forgetful(task: Task, base_url: str, api_key: str) -> Mapping[str, float] | None:
    """Call the tool, and begin a new conversation with each result that still has more than one operator."""
    messages: list[Any] = [*task.messages]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        while True:
            body = {"messages": messages, "tools": TOOLS}
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                if response.status != 200:
                    return None
                answer = (await response.json())["choices"][0]["message"]
            if not answer.get("tool_calls"):
                return None
            [call] = answer["tool_calls"][:1]
            try:
                left = await StepCalculator("").execute(json.loads(call["function"]["arguments"]))
            except ToolRefusal as refusal:
                left = str(refusal)
            expression = parse(left)
            if expression is not None and len(expression.operators) > 1:
                messages = [*opening(expression)]
            else:
                messages = [*messages, answer, {"role": "tool", "tool_call_id": call["id"], "content": left}]


@pytest.mark.long
def test_an_agent_that_forgets_its_history_trains_every_branch_and_the_learner_agrees_with_the_engine(
    start: Start, prepared: list[str]
) -> None:
    agent = f"actor.agent={forgetful.__module__}.{forgetful.__name__}"
    changes = ("replay.max_lag=0", "replay.retention=all", "learner.steps=3", "learner.eval_every=0")
    run = start("train", *prepared, agent, *changes)
    run.finish()
    steps = run.steps()
    assert [line["mismatch/agree"] for line in steps] == [1.0] * 3
    stored = StoredRun(run.dir / "replay")
    plans = [stored.plan(step) for step in range(3)]
    trained = [stored.trajectory(name) for plan in plans if plan for name in plan.ids]
    stored.close()
    assert len(trained) == 3 * 64
    several = [each for each in trained if each and len(each.branches) > 1]
    assert len(several) > len(trained) / 2
    for each in several:
        assert len(each.steps) == sum(turn.role is Role.ASSISTANT for turn in each.turns) >= len(each.branches)
