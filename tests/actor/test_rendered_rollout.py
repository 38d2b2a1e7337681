"""Episodes with our own tools that go on from what the template renders."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncrl.actor.chat import Chat
from asyncrl.actor.chat_api.conversation import ConversationLimits
from asyncrl.actor.episode import EpisodeFailed
from asyncrl.actor.rendered_rollout import run_rendered_episode
from asyncrl.actor.toolbox import Toolbox, ToolLimits
from asyncrl.actor.tools.base import Tool
from asyncrl.types import Finish, Trajectory
from tests.actor.fakes import CHATML, Cut, ScriptedEngine, call, make_ticket, make_tokenizer, make_tool
from tests.templates.families import tokenizer as family

LIMITS = ConversationLimits(max_turns=4, max_turn_tokens=400, max_tokens=4000, max_total_tokens=40_000)


class InOrder(ScriptedEngine):
    """Says its turns in order whatever the session."""

    async def generate(self, tokens: Any, sampling: Any, stop: Any, session: str) -> Any:
        self._turns[session] = len(self.requests)
        return await super().generate(tokens, sampling, stop, session)


def run(
    script: list[Any], tokenizer: Any, limits: ConversationLimits = LIMITS, tool: type[Tool] | None = None
) -> tuple[Trajectory, InOrder]:
    engine, chat = InOrder(tokenizer, script), Chat(tokenizer)
    toolbox = Toolbox({"echo": tool or make_tool()[0]}, ToolLimits(retries=0))
    trajectory = asyncio.run(run_rendered_episode(make_ticket(), lambda: None, engine, chat, toolbox, limits))
    assert {request[3] for request in engine.requests} <= set(engine.released)
    sampled = np.concatenate([each.tokens for each in engine.sampled])
    np.testing.assert_array_equal(trajectory.tokens[trajectory.loss_mask], sampled)
    return trajectory, engine


def test_an_episode_whose_history_the_template_keeps_is_one_branch():
    trajectory, _ = run([call("15"), "so", "never"], make_tokenizer(CHATML))
    assert len(trajectory.branches) == 1
    assert trajectory.finish is Finish.COMPLETED
    assert [turn.tool_calls[0].arguments for turn in trajectory.turns if turn.tool_calls] == [{"text": "15"}]


def test_where_the_template_drops_thoughts_the_policy_sees_what_a_deployment_would_show_it():
    tokenizer = family("qwq")
    trajectory, engine = run(["well\n</think>\n\n" + call("15"), "so\n</think>\n\ndone"], tokenizer)
    assert len(trajectory.branches) == 2
    messages = [
        *make_ticket().task.messages,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "echo", "arguments": {"text": "15"}}}],
        },
        {"role": "tool", "content": "15"},
    ]
    tools = [{"type": "function", "function": make_tool()[0].schema}]
    expected = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    shown = tokenizer.decode(engine.requests[1][0].tolist())
    assert "well" not in shown
    assert shown == expected


def test_a_malformed_call_is_answered_in_the_same_branch():
    trajectory, _ = run(["<tool_call>{</tool_call>", "done"], make_tokenizer(CHATML))
    assert len(trajectory.branches) == 1
    assert trajectory.finish is Finish.COMPLETED


def test_the_last_allowed_turn_makes_no_calls_and_a_cut_turn_ends_the_episode():
    tool, log = make_tool()
    assert run([call("1"), call("2")], make_tokenizer(), LIMITS_OF_TWO, tool)[0].finish is Finish.TRUNCATED
    assert log.executed == ["1"]
    assert run([Cut("no end")], make_tokenizer())[0].finish is Finish.TRUNCATED


LIMITS_OF_TWO = ConversationLimits(max_turns=2, max_turn_tokens=400, max_tokens=4000, max_total_tokens=40_000)


def test_a_prompt_without_room_and_a_tool_that_fails_fail_the_episode():
    with pytest.raises(EpisodeFailed, match=r"actor\.max_tokens"):
        run([], make_tokenizer(), ConversationLimits(2, 10, 10, 40))

    async def fails(text: str) -> str:
        raise OSError("broken")

    with pytest.raises(EpisodeFailed, match="broken"):
        run([call("1")], make_tokenizer(), tool=make_tool(fails)[0])
