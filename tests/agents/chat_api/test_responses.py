"""Responses: items of a conversation are recorded as its messages are, whole or by the name of the response before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.types import Grammar
from tests.agents.chat_api.support import CHAT, TOKENIZER, Agent, episode
from tests.episode.fakes import END, Cut, call, ids

TOOL = {"type": "function", "name": "echo", "parameters": {"type": "object", "properties": {"text": {}}}}
OTHER_TOOL = {"type": "function", "name": "other"}
THOUGHT = "<think>\nhm\n</think>\n\n"


async def respond(agent: Agent, **body: Any) -> dict[str, Any]:
    status, answer = await agent.send(path="responses", json=body)
    assert status == 200, answer
    return dict(answer)


def kinds(answer: dict[str, Any]) -> list[str]:
    return [item["type"] for item in answer["output"]]


def result(answer: dict[str, Any], text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": answer["output"][-1]["call_id"], "output": text}


@pytest.mark.parametrize("whole", [True, False])
async def test_a_conversation_that_only_grows_is_one_branch_by_its_items_or_the_name_of_its_last_response(
    whole: bool,
):
    async with episode([THOUGHT + "Look. " + call("x"), THOUGHT + "15", "yes"]) as agent:
        written: list[Any] = [{"role": "user", "content": "one"}]
        previous = None
        for following in ("result", {"role": "user", "content": [{"type": "input_text", "text": "two"}]}, None):
            sent = written if whole else written[-1:]
            names = {} if whole else {"previous_response_id": previous}
            answer = await respond(agent, input=sent, tools=[TOOL], instructions="be brief", **names)
            previous = answer["id"]
            written += answer["output"]
            written += [result(answer, "r") if following == "result" else following]
        assert kinds(answer) == ["message"]
        assert answer["output"][0]["content"][0]["text"] == "yes"
        assert answer["status"] == "completed"
    assert len(agent.trajectory.branches) == 1
    assert CHAT.text(agent.trajectory.tokens).startswith("<|im_start|>system\nbe brief")


async def test_a_text_is_an_input_and_reasoning_message_and_calls_are_items():
    async with episode([THOUGHT + "Look. " + call("x") + call("y")]) as agent:
        answer = await respond(agent, input="one", tools=[TOOL], include=["message.output_text.logprobs"])
    assert kinds(answer) == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Look."
    assert [json.loads(each["arguments"]) for each in (first, second)] == [{"text": "x"}, {"text": "y"}]
    sampled = answer["usage"]["output_tokens"]
    assert len(message["content"][0]["logprobs"]) == sampled == agent.trajectory.sampled_tokens


async def test_a_response_that_is_not_stored_cannot_be_continued():
    async with episode(["a"]) as agent:
        answer = await respond(agent, input="one", store=False)
        body = {"input": "two", "previous_response_id": answer["id"]}
        status, refused = await agent.send(path="responses", json=body)
        assert (status, "has not stored" in refused["error"]["message"]) == (400, True)


async def test_a_response_that_was_cut_is_incomplete_and_says_why():
    async with episode([Cut("never end")]) as agent:
        answer = await respond(agent, input="one", max_output_tokens=30)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert agent.engine.requests[0][1].max_new_tokens == 30


async def test_a_text_format_is_a_grammar():
    async with episode(["{}"]) as agent:
        form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
        await respond(agent, input="one", text={"format": form})
    assert agent.engine.requests[0][1].grammar == Grammar("json_schema", '{"type": "object"}')


async def test_the_events_of_a_stream_are_numbered_and_put_together_the_answer():
    async with episode([THOUGHT + "some words first. " + call("a longer text")]) as agent:
        _, text = await agent.send(path="responses", json={"input": "one", "tools": [TOOL], "stream": True})
    blocks = [block.splitlines() for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [head.removeprefix("event: ") for head, _ in blocks] == [each["type"] for each in events]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    begun, *_, last = events
    assert (begun["type"], begun["response"]["output"]) == ("response.created", [])
    assert last["type"] == "response.completed"
    reasoning, message, made = last["response"]["output"]
    deltas: dict[tuple[int, str], str] = {}
    for each in events:
        if each["type"].endswith(".delta"):
            key = each["output_index"], each["type"]
            deltas[key] = deltas.get(key, "") + each["delta"]
    assert deltas == {
        (0, "response.reasoning_text.delta"): reasoning["content"][0]["text"],
        (1, "response.output_text.delta"): message["content"][0]["text"],
        (2, "response.function_call_arguments.delta"): made["arguments"],
    }
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    assert (
        len(ids(TOKENIZER, THOUGHT + "some words first. " + call("a longer text") + END))
        == (last["response"]["usage"]["output_tokens"])
    )


async def test_a_tool_choice_limits_what_is_offered():
    async with episode([call("x", "other"), call("x"), "none"]) as agent:
        tools = [TOOL, OTHER_TOOL]
        only = {"type": "function", "name": "echo"}
        assert kinds(await respond(agent, input="one", tools=tools, tool_choice=only)) == ["message"]
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [only]}
        assert kinds(await respond(agent, input="one", tools=tools, tool_choice=allowed)) == ["function_call"]
        await respond(agent, input="two", tools=tools, tool_choice="none", seed=5)
    assert (agent.counts.wanted_calls, agent.counts.unmet_calls, agent.counts.overridden) == (2, 1, 1)
    assert "echo" not in CHAT.text(agent.engine.requests[2][0])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "a text, or a list of items"),
        ({"input": []}, "a text, or a list of items"),
        ({"input": [5]}, "a text, or a list of items"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "previous_response_id": ["x"]}, "previous_response_id is ['x']"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "a tool of type web_search"),
        ({"input": "x", "tools": 5}, "a tool of type None"),
        ({"input": "x", "tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "type item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "an image is None"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "type input_file"),
        ({"input": [{"role": "robot", "content": "x"}]}, "a message must have a role"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "a tool call cannot be read"),
        ({"input": "x", "text": 5}, "text is 5"),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "response_format"),
        ({"input": "x", "max_output_tokens": -1}, "max_output_tokens is -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_cannot_be_recorded_is_refused_by_name(body: dict[str, Any], reason: str):
    async with episode(["a"]) as agent:
        status, answer = await agent.send(path="responses", json=body)
        assert status == 400
        assert reason in answer["error"]["message"]
        await respond(agent, input="one")
