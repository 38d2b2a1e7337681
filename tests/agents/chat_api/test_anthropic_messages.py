"""Anthropic's Messages: blocks of a conversation are recorded as its messages are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.types import Grammar
from tests.agents.chat_api.support import CHAT, Agent, episode, user
from tests.episode.fakes import Cut, call

TOOL = {"name": "echo", "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}}}
OTHER_TOOL = {"name": "other", "input_schema": {}}
THOUGHT = "<think>\nhm\n</think>\n\n"
THINKING = {"type": "enabled", "budget_tokens": 1024}


async def say(agent: Agent, *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 200, **body}
    status, answer = await agent.send(path="messages", json=body)
    assert status == 200, answer
    return dict(answer)


def turn(answer: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": answer["content"]}


def kinds(answer: dict[str, Any]) -> list[str]:
    return [block["type"] for block in answer["content"]]


@pytest.mark.parametrize("thinks", [True, False])
async def test_a_conversation_that_only_grows_is_one_branch_with_the_results_in_users_messages(thinks: bool):
    async with episode([THOUGHT + "Look. " + call("x") + call("y"), THOUGHT + "15", "yes"]) as agent:
        options: Any = {"tools": [TOOL], "system": [{"type": "text", "text": "be brief"}]}
        options |= {"thinking": THINKING} if thinks else {}
        messages = [user("one")]
        answer = await say(agent, *messages, **options)
        assert answer["stop_reason"] == "tool_use"
        assert kinds(answer) == ["thinking"] * thinks + ["text", "tool_use", "tool_use"]
        *_, first, second = answer["content"]
        assert (first["input"], second["input"]) == ({"text": "x"}, {"text": "y"})
        results = [
            {"type": "tool_result", "tool_use_id": first["id"], "content": "r"},
            {"type": "tool_result", "tool_use_id": second["id"], "content": [{"type": "text", "text": "s"}]},
        ]
        messages += [turn(answer), {"role": "user", "content": results}]
        answer = await say(agent, *messages, **options)
        assert (answer["stop_reason"], answer["content"][-1]) == ("end_turn", {"type": "text", "text": "15"})
        messages += [turn(answer), user("sure?")]
        assert kinds(await say(agent, *messages, **options)) == ["text"]
    assert len(agent.trajectory.branches) == 1
    text = CHAT.text(agent.trajectory.tokens)
    assert text.startswith("<|im_start|>system\nbe brief")
    assert "r\n</tool_response>" in text
    assert "s\n</tool_response>" in text


async def test_what_a_user_says_beside_results_follows_them():
    async with episode([call("x"), "yes"]) as agent:
        answer = await say(agent, user("one"), tools=[TOOL])
        result = {"type": "tool_result", "tool_use_id": answer["content"][0]["id"], "content": None}
        blocks = [{"type": "text", "text": "go on"}, result]
        await say(agent, user("one"), turn(answer), {"role": "user", "content": blocks}, tools=[TOOL])
    assert len(agent.trajectory.branches) == 1
    assert "</tool_response><|im_end|>\n<|im_start|>user\ngo on" in CHAT.text(agent.trajectory.tokens)


async def test_the_key_may_come_in_either_header():
    async with episode(["a"]) as agent:
        _, key = await agent.address
        body = {"messages": [user("one")], "max_tokens": 5}
        status, answer = await agent.send(path="messages", headers={"x-api-key": "guess"}, json=body)
        assert (status, answer["type"], answer["error"]["type"]) == (401, "error", "authentication_error")
        headers = {"x-api-key": key, "Authorization": "Bearer guess"}
        assert (await agent.send(path="messages", headers=headers, json=body))[0] == 200


async def test_a_stop_sequence_and_a_limit_are_the_reasons_of_the_end():
    async with episode(["one END two", Cut("never end")]) as agent:
        answer = await say(agent, user("one"), stop_sequences=["END"])
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
        assert answer["content"] == [{"type": "text", "text": "one "}]
        assert (await say(agent, user("two"), temperature=0.3))["stop_reason"] == "max_tokens"
    assert agent.counts.overridden == 1


async def test_calls_before_a_stop_sequence_are_the_reason_of_the_end() -> None:
    async with episode([call("x") + " END two"]) as agent:
        answer = await say(agent, user("one"), tools=[TOOL], stop_sequences=["END"])
        assert kinds(answer) == ["tool_use"]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)


async def test_a_wish_for_one_call_at_a_time_has_no_effect_and_is_counted() -> None:
    async with episode([call("x") + call("y"), "a"]) as agent:
        for single in (True, False):
            choice = {"type": "auto", "disable_parallel_tool_use": single}
            await say(agent, user("one"), tools=[TOOL], tool_choice=choice)
    assert agent.counts.overridden == 1


async def test_an_output_format_is_a_grammar():
    async with episode(["{}"]) as agent:
        form = {"type": "json_schema", "schema": {"type": "object"}}
        await say(agent, user("one"), output_config={"format": form})
    assert agent.engine.requests[0][1].grammar == Grammar("json_schema", '{"type": "object"}')


async def test_the_events_of_a_stream_put_together_the_answer():
    async with episode([THOUGHT + "some words first. " + call("a longer text")]) as agent:
        body = {"messages": [user("one")], "tools": [TOOL], "thinking": THINKING, "stream": True}
        _, text = await agent.send(path="messages", json=body)
    blocks = [block.splitlines() for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [head.removeprefix("event: ") for head, _ in blocks] == [each["type"] for each in events]
    assert [each["type"] for each in events if "content_block" not in each["type"]] == [
        *("message_start", "message_delta", "message_stop")
    ]
    texts = {0: "", 1: "", 2: ""}
    for each in events:
        if each["type"] == "content_block_delta":
            delta = each["delta"]
            key = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
            texts[each["index"]] += delta.get(key.get(delta["type"], ""), "")
    assert (texts[0], texts[1], json.loads(texts[2])) == ("hm", "some words first.", {"text": "a longer text"})
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == agent.trajectory.sampled_tokens


async def test_a_tool_choice_limits_what_is_offered():
    async with episode([call("x", "other"), "free", "none"]) as agent:
        tools = [TOOL, OTHER_TOOL]
        only = {"type": "tool", "name": "echo"}
        assert kinds(await say(agent, user("one"), tools=tools, tool_choice=only)) == ["text"]
        await say(agent, user("one"), tools=tools, tool_choice={"type": "any"})
        await say(agent, user("two"), tools=tools, tool_choice={"type": "none"})
    assert (agent.counts.wanted_calls, agent.counts.unmet_calls) == (2, 2)
    assert "echo" not in CHAT.text(agent.engine.requests[2][0])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": []}, "list of messages"),
        ({"messages": ["x"]}, "a message must have a role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "a message must have a role"),
        ({"messages": [{"role": "user", "content": 5}]}, "a text, or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "the source of an image must be"),
        ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "type server_tool_use"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "a tool call cannot be read"),
        ({"system": 5}, "a text, or a list of blocks"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "a tool of type bash_20250124"),
        ({"tools": [{"name": "x", "input_schema": 5}]}, "a tool must be"),
        ({"tool_choice": "auto"}, "its type must be"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": "json"}, "output_config is json"),
        ({"output_config": {"format": "json"}}, "response_format is"),
        ({"stop_sequences": 5}, "stop_sequences is 5"),
        ({"max_tokens": "many"}, "max_tokens is many"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_be_recorded_is_refused_by_name(body: dict[str, Any], reason: str):
    async with episode(["a"]) as agent:
        status, answer = await agent.send(path="messages", json={"messages": [user("one")], **body})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert reason in answer["error"]["message"]
        await say(agent, user("one"))
