"""Built-in agents and programs end a conversation for every reason for which the endpoint has no room for a turn."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from aiohttp import web

import asyncrl.agents
from asyncrl.agents.chat_api.result import AgentError
from asyncrl.agents.policy import FULL, policy_at
from tests.agents.support import served

VERIFIERS = Path(asyncrl.agents.__file__).parent / "programs" / "verifiers_agent" / "asyncrl_chat.py"
MESSAGES = [{"role": "user", "content": "Play."}]


@pytest.mark.parametrize("code", ["context_length_exceeded", "turn_limit", "image_limit", "image_placeholder"])
async def test_a_conversation_without_room_for_another_turn_ends_if_it_has_a_turn(code: str) -> None:
    answers = [
        web.json_response({"error": {"message": "no room", "code": code}}, status=400),
        web.json_response({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}),
        web.json_response({"error": {"message": "no room", "code": code}}, status=400),
    ]

    async def answer(request: web.Request) -> web.Response:
        return answers.pop(0)

    async with served([web.post("/chat/completions", answer)]) as url, policy_at(url, "key") as policy:
        with pytest.raises(AgentError, match="no room"):
            await policy.chat(MESSAGES)
        assert await policy.chat(MESSAGES) is not None
        assert await policy.chat(MESSAGES) is None


def test_the_program_of_verifiers_which_cannot_import_asyncrl_knows_the_same_codes() -> None:
    assigned = [node for node in ast.parse(VERIFIERS.read_text()).body if isinstance(node, ast.Assign)]
    [ends] = [each.value for each in assigned if ast.unparse(each.targets[0]) == "ENDS"]
    assert ast.literal_eval(ends) == FULL
