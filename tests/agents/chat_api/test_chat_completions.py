"""The fields of a chat completion: what is honoured, what is counted, and that none changes what is recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import numpy as np
import pytest

from asyncrl.chat.history import repeats
from asyncrl.chat.template import answer, calling, with_reasoning
from asyncrl.chat.thoughts import join_thought, split_thought
from asyncrl.engine.base import Alternatives, Generation
from asyncrl.types import Role
from tests.agents.chat_api.support import CHAT, LIMITS, TOKENIZER, TOOL, episode, says, user
from tests.episode.fakes import END, QWEN3, call, ids, make_tokenizer
from tests.templates.families import tokenizer as family

THOUGHT = "<think>\nhm\n</think>\n\n"
ANY = {"type": "function", "function": {"name": "echo", "parameters": {"properties": {"text": {"default": 1}}}}}
OTHER_TOOL = {"type": "function", "function": {"name": "other", "parameters": {}}}


def chunks(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which ends as it must."""
    *events, end = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert end == "[DONE]"
    return [json.loads(each) for each in events]


def put_together(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices of a stream, as clients build them from its pieces."""
    made: dict[int, dict[str, Any]] = {}
    for choice in (choice for each in events for choice in each["choices"]):
        built = made.setdefault(choice["index"], {"content": "", "reasoning_content": "", "calls": {}})
        delta = choice["delta"]
        for key in ("content", "reasoning_content"):
            built[key] += delta.get(key) or ""
        for piece in delta.get("tool_calls", ()):
            function = built["calls"].setdefault(piece["index"], {"name": "", "arguments": ""})
            for key in function:
                function[key] += piece["function"].get(key) or ""
        built["finish_reason"] = choice["finish_reason"]
    return made


async def test_stop_cuts_what_the_agent_gets_and_nothing_of_what_is_recorded():
    async with episode(["one Obs: two", "done"]) as agent:
        _, body = await agent.post(user("one"), stop=["Obs:", "never"])
        [choice] = body["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
        await agent.ask(user("one"), choice["message"], user("go on"), stop="Obs:")
    assert "one Obs: two" + END in CHAT.text(agent.trajectory.tokens)
    assert len(agent.trajectory.branches) == 2, "the policy never saw a conversation without the rest"


@pytest.mark.parametrize("repeated", ["code", "code</code>", " code\n"])
async def test_a_completion_of_which_stop_cut_only_the_stop_itself_goes_on_in_its_branch(repeated: str):
    async with episode(["code</code>\n", "done"]) as agent:
        assert (await agent.ask(user("one"), stop=["</code>"]))["content"] == "code"
        await agent.ask(user("one"), says(repeated), user("go on"))
    assert len(agent.trajectory.branches) == 1


async def test_calls_behind_a_stop_reach_nobody():
    async with episode(["Obs: " + call("x")]) as agent:
        assert await agent.ask(user("one"), tools=[TOOL], stop="Obs:") == says("")
    assert not any(turn.tool_calls for turn in agent.trajectory.turns)


async def test_n_answers_are_branches_with_one_prompt_and_any_of_them_goes_on():
    async with episode(["a", "b", "c", "after b"]) as agent:
        _, body = await agent.post(user("one"), n=3)
        said = [choice["message"]["content"] for choice in body["choices"]]
        assert sorted(said) == ["a", "b", "c"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        prompt = len(agent.engine.requests[0][0])
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (
            prompt,
            sum(len(ids(TOKENIZER, each + END)) for each in said),
        )
        await agent.ask(user("one"), says("b"), user("go on"))
    assert len(agent.trajectory.branches) == 3
    assert f"b{END}\n<|im_start|>user\ngo on" in CHAT.text(agent.trajectory.tokens)


async def test_n_answers_of_which_one_fails_leave_nothing_of_the_others():
    async def fails(session: str) -> str:
        raise OSError("no engine")

    async with episode(["a", "b", fails], fails=(OSError, "no engine")) as agent:
        await agent.ask(user("one"))
        assert (await agent.post(user("two"), n=2))[0] == 503
        assert agent.counts.answered == 1


async def test_settings_of_sampling_have_no_effect_and_are_counted():
    async with episode(["a", "b", "c"]) as agent:
        await agent.ask(user("one"), top_p=1, temperature=None, presence_penalty=0.0, parallel_tool_calls=True)
        assert agent.counts.overridden == 0
        await agent.ask(user("two"), seed=7)
        await agent.ask(user("three"), temperature=0.2, top_p=0.5)
    assert agent.counts.overridden == 2
    assert {sampling.temperature for _, sampling, *_ in agent.engine.requests} == {1.0}


async def test_a_wish_for_one_call_at_a_time_is_counted_and_the_agent_gets_all_calls_and_answers_each():
    async with episode([call("x") + call("y"), "done"]) as agent:
        made = await agent.ask(user("one"), tools=[TOOL], parallel_tool_calls=False)
        assert [json.loads(each["function"]["arguments"])["text"] for each in made["tool_calls"]] == ["x", "y"]
        assert agent.counts.overridden == 1
        answers = [
            {"role": "tool", "tool_call_id": each["id"], "content": content}
            for each, content in zip(made["tool_calls"], ("x", "Error: one call at a time"), strict=True)
        ]
        await agent.ask(user("one"), made, *answers, tools=[TOOL])
    assert len(agent.trajectory.branches) == 1


async def test_a_tool_choice_limits_what_is_offered_and_a_call_that_it_wants_is_counted_and_never_forced():
    async with episode(["free", call("x"), "none", call("x", "other"), call("x")]) as agent:
        await agent.ask(user("one"), tools=[TOOL], tool_choice="required")
        await agent.ask(user("one"), tools=[TOOL], tool_choice="required")
        assert (agent.counts.wanted_calls, agent.counts.unmet_calls) == (2, 1)
        await agent.ask(user("two"), tools=[TOOL], tool_choice="none")
        choice: Mapping[str, Any] = {"type": "function", "function": {"name": "echo"}}
        assert "tool_calls" not in await agent.ask(user("3"), tools=[TOOL, OTHER_TOOL], tool_choice=choice)
        allowed = {"mode": "auto", "tools": [choice]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        assert "tool_calls" in await agent.ask(user("4"), tools=[TOOL, OTHER_TOOL], tool_choice=choice)
    assert (agent.counts.wanted_calls, agent.counts.unmet_calls) == (3, 2)
    shown = [[name in CHAT.text(request[0]) for name in ("echo", "other")] for request in agent.engine.requests]
    assert shown == [[True, False], [True, False], [False, False], [True, False], [True, False]]


async def test_logprobs_and_token_ids_are_those_that_are_recorded():
    async with episode(["yes 5", "b"]) as agent:
        _, body = await agent.post(user("one"), logprobs=True, top_logprobs=0, return_token_ids=True)
        _, plain = await agent.post(user("two"))
    [choice] = body["choices"]
    start, end = next((turn.start, turn.end) for turn in agent.trajectory.turns if turn.role is Role.ASSISTANT)
    tokens = agent.trajectory.tokens
    assert choice["token_ids"] == tokens[start:end].tolist()
    assert body["prompt_token_ids"] == tokens[:start].tolist()
    content = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == "yes 5" + END
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    np.testing.assert_allclose([each["logprob"] for each in content], agent.trajectory.logprobs[start:end], rtol=1e-6)
    assert plain["choices"][0]["logprobs"] is None
    assert not {"prompt_token_ids", "token_ids"} & {*plain, *plain["choices"][0]}


async def test_the_likeliest_tokens_come_where_the_engine_tells_them():
    said = ids(TOKENIZER, "5" + END)
    others = Alternatives(np.stack([said, said[::-1]], 1), np.full((len(said), 2), -0.7, np.float32))
    versions = np.full(len(said), 3, np.int32)
    sampled = Generation(said, np.full(len(said), -0.7, np.float32), versions, "stop", alternatives=others)
    async with episode([sampled, "a"]) as agent:
        _, body = await agent.post(user("one"), logprobs=True, top_logprobs=2)
        _, without = await agent.post(user("two"), logprobs=True, top_logprobs=2)
    assert [sampling.alternatives for _, sampling, *_ in agent.engine.requests] == [2, 2]
    first, last = body["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in first["top_logprobs"]] == ["5", END]
    assert [each["token"] for each in last["top_logprobs"]] == [END, "5"]
    assert {each["logprob"] for each in first["top_logprobs"]} == {first["logprob"]}
    assert without["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_a_stream_has_the_answer_in_pieces_as_clients_put_them_together():
    said = "some words first. " + call("a longer text") + call("b")
    async with episode([THOUGHT + said, THOUGHT + said, "free"]) as agent:
        _, body = await agent.post(user("one"), tools=[TOOL])
        options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        _, text = await agent.post(user("one"), tools=[TOOL], **options)
        *events, usage = chunks(text)
        _, plain = await agent.post(user("two"), stream=True, logprobs=True)
    assert usage["choices"] == []
    assert usage["usage"] == body["usage"]
    assert {each["usage"] for each in events} == {None}
    [built] = put_together(events).values()
    message = body["choices"][0]["message"]
    assert built == {
        "content": "some words first.",
        "reasoning_content": "hm",
        "calls": {index: each["function"] for index, each in enumerate(message["tool_calls"])},
        "finish_reason": "tool_calls",
    }
    assert sum("content" in each["choices"][0]["delta"] for each in events) > 2
    assert len(events[0]["prompt_token_ids"]) == usage["usage"]["prompt_tokens"]
    assert len(events[0]["choices"][0]["token_ids"]) == usage["usage"]["completion_tokens"]
    first, *_, last = chunks(plain)
    assert "usage" not in last
    assert len(first["choices"][0]["logprobs"]["content"]) == len(ids(TOKENIZER, "free" + END))


async def test_each_choice_of_a_stream_has_its_index():
    async with episode(["a", "b"]) as agent:
        _, text = await agent.post(user("one"), n=2, stream=True)
    built = put_together(chunks(text))
    assert sorted(each["content"] for each in built.values()) == ["a", "b"]
    assert {each["finish_reason"] for each in built.values()} == {"stop"}


async def test_the_model_tells_the_length_of_a_branch_and_an_overlong_request_says_so_in_the_usual_words():
    async with episode(["a"]) as agent:
        url, key = await agent.address
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
            session.get(f"{url}/models") as listed,
        ):
            [model] = (await listed.json())["data"]
        assert (model["id"], model["max_model_len"]) == ("policy", LIMITS.max_tokens)
        error = await agent.refusal(user("word " * LIMITS.max_tokens))
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is actor.max_tokens={LIMITS.max_tokens}" in error["message"]
        await agent.ask(user("one"))


@pytest.mark.parametrize("form", ["dropped", "beside", "within"])
@pytest.mark.parametrize("template", ["chatml", "qwen3"])
async def test_thoughts_are_beside_the_content_and_the_branch_goes_on_however_they_come_back(form: str, template: str):
    tokenizer = make_tokenizer(QWEN3) if template == "qwen3" else TOKENIZER
    async with episode([f"{THOUGHT}Look. {call('x')}", THOUGHT + "15", "yes"], tokenizer=tokenizer) as agent:
        messages: list[Any] = [user("one")]
        for following in ({"role": "tool", "content": "r"}, user("sure?")):
            made = await agent.ask(*messages, tools=[TOOL])
            assert made["reasoning_content"] == "hm"
            assert made["content"] in ("Look.", "15")
            if following["role"] == "tool":
                following["tool_call_id"] = made["tool_calls"][0]["id"]
            if form != "beside":
                del made["reasoning_content"]
            if form == "within":
                made["content"] = THOUGHT + made["content"]
            messages += [made, following]
        assert await agent.ask(*messages, tools=[TOOL]) == says("yes")
    assert len(agent.trajectory.branches) == 1


async def test_a_thought_that_the_prompt_opens_is_beside_the_content_even_where_it_never_ends():
    async with episode(["hm\n</think>\n\nyes", "hm"], tokenizer=family("qwq")) as agent:
        assert await agent.ask(user("one")) == says("yes", reasoning_content="hm")
        assert await agent.ask(user("two")) == says("", reasoning_content="hm")


async def test_a_new_branch_shows_the_thoughts_that_come_back_also_where_the_template_knows_none_beside():
    async with episode(["a", "b"]) as agent:
        await agent.ask(user("one"))
        await agent.ask(user("other"), says("x", reasoning_content="hm"), user("go on"))
    assert THOUGHT + "x" in CHAT.text(agent.engine.requests[1][0])


def test_thoughts_are_split_from_content_and_joined_again():
    for text, opened, apart in (
        ("yes", False, ("", "yes")),
        (THOUGHT + "yes ", False, ("hm", "yes ")),
        ("hm</think>yes", False, ("hm", "yes")),
        ("hm", True, ("hm", "")),
        ("<think>hm", False, ("hm", "")),
        ("say <think>", False, ("", "say <think>")),
        ("<think>a</think>b</think>c", False, ("a</think>b", "c")),
    ):
        assert split_thought(text, opened) == apart
    assert join_thought("hm", "yes") == THOUGHT + "yes"


MADE = calling([{"text": "x"}, {"text": "y"}], ["echo", "echo"], "Look.")
LISTED = [{"id": "call_2", "type": "function", "function": call["function"]} for call in MADE["tool_calls"]]
CODE = [{"id": "call_1", "type": "function", "function": {"name": "python_interpreter", "arguments": "f(5)"}}]


@pytest.mark.parametrize(
    ("repeated", "known", "same"),
    [
        (answer("yes "), answer("yes"), True),
        (answer("yes."), answer("yes"), False),
        (with_reasoning(answer("yes"), "hm"), with_reasoning(answer("yes"), "other"), True),
        (answer(THOUGHT + "yes"), answer("yes"), True),
        (user("yes "), user("yes"), False),
        (user("yes"), answer("yes"), False),
        (MADE, answer("Look."), False),
        (answer("Look."), MADE, False),
        (calling([{"text": "x"}, {"text": "z"}], ["echo", "echo"], "Look."), MADE, False),
        (answer(f"Look.\nCalling tools:\n{LISTED[::-1]}"), MADE, True),
        (answer(f"Look.\nCalling tools:\n{LISTED[:1]}"), MADE, False),
        (answer(f"Look!\nCalling tools:\n{LISTED}"), MADE, False),
        (answer("Look.\nCalling tools:\n__import__('os')"), MADE, False),
        (answer("Look.\nCalling tools:\n" + "[" * 5000), MADE, False),
        (answer("Look.\nCalling tools:\n5"), MADE, False),
        (answer(f"f(5)\nCalling tools:\n{CODE}"), answer("f(5)"), True),
        (answer(f"f(5)\nCalling tools:\n{LISTED}"), answer("f(5)"), False),
    ],
)
def test_turns_are_compared_by_content_and_calls_and_other_messages_word_for_word(
    repeated: Mapping[str, Any], known: Mapping[str, Any], same: bool
):
    assert repeats([user("one"), repeated], [user("one"), known]) is same
    assert not repeats([repeated], [user("one"), known])


async def test_arguments_and_tools_with_true_in_the_place_of_1_are_another_history():
    async with episode([call("x").replace('"x"', "1"), "a", "b", "c"]) as agent:
        said = await agent.ask(user("one"), tools=[ANY])
        [made] = said["tool_calls"]
        result = {"role": "tool", "tool_call_id": made["id"], "content": "x"}

        def written(value: str) -> dict[str, Any]:
            function = {"name": "echo", "arguments": f'{{"text": {value}}}'}
            return {**said, "tool_calls": [{**made, "function": function}]}

        await agent.ask(user("one"), written("1.0"), result, tools=[ANY])
        assert len(agent.engine.requests[0][0]) < len(agent.engine.requests[1][0])
        await agent.ask(user("one"), written("true"), result, tools=[ANY])
        await agent.ask(
            user("one"), said, result, user("go on"), tools=[json.loads(json.dumps(ANY).replace(": 1}", ": true}"))]
        )
    assert len(agent.trajectory.branches) == 3
    assert not repeats([calling([{"a": [1]}])], [calling([{"a": [True]}])])
    assert repeats([calling([{"a": [1.0]}])], [calling([{"a": [1]}])])


async def test_a_part_without_a_text_has_none_and_one_with_another_value_is_refused():
    async with episode(["a"]) as agent:
        await agent.ask({"role": "user", "content": [{"type": "text", "text": None}, {"type": "text", "text": "q"}]})
        error = await agent.refusal({"role": "user", "content": [{"type": "text", "text": {"a": 1}}]})
        assert "must be a text" in error["message"]
    assert "user\nq<|im_end|>" in CHAT.text(agent.trajectory.tokens)
