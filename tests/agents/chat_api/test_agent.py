"""An agent that uses the chat-completions API becomes an exact episode, even if it rewrites its history."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.agents import AgentResult
from asyncrl.agents.chat_api.agent import AgentPlayer, load_agent
from asyncrl.agents.chat_api.result import MAX_METRICS, AgentError
from asyncrl.agents.chat_api.server import MAX_REQUEST_BYTES
from asyncrl.engine.base import Generation
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.errors import ConfigError, EngineError, InvariantError
from asyncrl.types import Finish, Grammar, Role, Task
from tests.agents.chat_api.support import CHAT, LIMITS, TOKENIZER, TOOL, episode, says, user
from tests.episode.fakes import (
    CHATML,
    END,
    Cut,
    ScriptedEngine,
    call,
    ids,
    make_ticket,
    make_tokenizer,
)
from tests.helpers import async_until
from tests.templates.families import tokenizer as family

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"


def empty(finish: str) -> Generation:
    return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), finish)


async def test_a_conversation_that_only_grows_is_one_trajectory_of_the_templates_own_tokens():
    async with episode(["hm " + call("15"), "fifteen", "yes"]) as agent:
        messages: list[Any] = [user("5*3?")]
        first = await agent.ask(*messages, tools=[TOOL])
        [made] = first["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"text": "15"}
        messages += [first, {"role": "tool", "tool_call_id": made["id"], "content": "15"}]
        second = await agent.ask(*messages, tools=[TOOL])
        assert second["content"] == "fifteen"
        messages += [{**second, "refusal": None}, {"role": "user", "content": [{"type": "text", "text": "sure?"}]}]
        assert (await agent.ask(*messages, tools=[TOOL]))["content"] == "yes"
        agent.outcome = {"polite": 1}

    trajectory = agent.trajectory
    assert trajectory.id == "t/1"
    assert trajectory.finish is Finish.COMPLETED
    assert trajectory.rewards == {"polite": 1.0}
    assert set(trajectory.timings) == {"wait", "generate", "agent"}
    roles = [turn.role for turn in trajectory.turns]
    assert roles == [Role.PROMPT, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    conversation = [
        user("5*3?"),
        says("hm", tool_calls=[{"type": "function", "function": {"name": "echo", "arguments": {"text": "15"}}}]),
        {"role": "tool", "name": "echo", "content": "15"},
        says("fifteen"),
        user("sure?"),
    ]
    whole = TOKENIZER.apply_chat_template(conversation, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    text = CHAT.text(trajectory.tokens)
    assert text == whole.replace("hm\n<tool_call>", "hm <tool_call>") + "yes" + END
    assert agent.counts.branches == 1
    assert len({request[3] for request in agent.engine.requests}) == 1


async def test_the_agent_of_the_documentation_plays_an_episode(tmp_path: Path):
    (tmp_path / "my_agents.py").write_text(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])
    player = AgentPlayer(runpy.run_path(str(tmp_path / "my_agents.py"))["solve"])
    engine = ScriptedEngine(TOKENIZER, ["well", "it is 15"], end=END)
    await player.start()
    try:
        trajectory = await EpisodeRunner(engine, CHAT, player, LIMITS).run(make_ticket("t/1"), lambda: None)
    finally:
        await player.close()
    assert trajectory.rewards == {"reminders": -0.1}
    assert sum(turn.role is Role.ASSISTANT for turn in trajectory.turns) == 2


async def test_the_openai_client_of_the_documentation_calls_a_tool(tmp_path: Path):
    pytest.importorskip("openai", reason="the block needs the package openai")
    source = next(each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "openai" in each)
    (tmp_path / "my_openai_agent.py").write_text(source)
    player = AgentPlayer(runpy.run_path(str(tmp_path / "my_openai_agent.py"))["solve"])
    looks = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Bern"}}\n</tool_call>'
    engine = ScriptedEngine(TOKENIZER, [looks, "it is 134000"], end=END)
    task = Task("t", [user("How many live in Bern?")], "134000", "t", extra_info={"populations": {"Bern": 134000}})
    await player.start()
    try:
        ticket = replace(make_ticket("t/1"), task=task)
        trajectory = await EpisodeRunner(engine, CHAT, player, LIMITS).run(ticket, lambda: None)
    finally:
        await player.close()
    assert trajectory.rewards == {"calls": -0.01}
    assert "134000" in CHAT.text(trajectory.tokens).partition("it is")[0]
    assert [call.name for turn in trajectory.turns for call in turn.tool_calls] == ["look_up"]


async def test_an_agent_that_summarises_its_history_trains_all_of_it_and_its_last_completion_is_last():
    async with episode([call("gold"), "there is gold", "sold it", "done"]) as agent:
        asked = [user("dig"), await agent.ask(user("dig"), tools=[TOOL])]
        result = {"role": "tool", "tool_call_id": asked[1]["tool_calls"][0]["id"], "content": "gold"}
        summary = (await agent.ask(user("sum up: gold was found")))["content"]
        assert (await agent.ask(user(summary), user("go on")))["content"] == "sold it"
        assert (await agent.ask(*asked, result, tools=[TOOL]))["content"] == "done"

    trajectory = agent.trajectory
    spans = [trajectory.tokens[turn.start : turn.end] for turn in trajectory.turns if turn.role is Role.ASSISTANT]
    assert [CHAT.text(span) for span in spans] == [
        each + END for each in ("there is gold", "sold it", call("gold"), "done")
    ]
    assert [turn.tool_calls[0].arguments for turn in trajectory.turns if turn.tool_calls] == [{"text": "gold"}]
    assert len(trajectory.steps) == 4
    assert trajectory.finish is Finish.COMPLETED
    assert agent.counts.branches == len(trajectory.branches) == 3


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"max_turn_tokens": 20, "max_total_tokens": 100}, "context_length_exceeded"), ({"max_turns": 3}, "turn_limit")],
)
async def test_limits_hold_however_many_requests_come_at_once(limits: dict[str, int], code: str):
    async with episode([f"{index} is a number" for index in range(8)], replace(LIMITS, **limits)) as agent:
        answers = await asyncio.gather(*(agent.post(user(f"number {index}")) for index in range(8)))
    refused = [body["error"]["code"] for status, body in answers if status != 200]
    assert len(agent.trajectory) <= limits.get("max_total_tokens", len(agent.trajectory))
    assert len(agent.trajectory.branches) <= limits.get("max_turns", 8)
    assert agent.trajectory.finish is Finish.TRUNCATED
    assert set(refused) == {code}
    assert agent.counts.refused == len(refused) == 8 - agent.counts.answered < 6


async def test_a_request_that_the_agent_did_not_wait_for_leaves_nothing_behind():
    begun, gave_up = asyncio.Event(), asyncio.Event()

    async def never(session: str) -> str:
        begun.set()
        try:
            return await asyncio.Event().wait()
        finally:
            gave_up.set()

    async def impatient(*messages: dict[str, Any]) -> None:
        begun.clear()
        gave_up.clear()
        asking = asyncio.ensure_future(agent.post(*messages))
        await begun.wait()
        asking.cancel()
        await gave_up.wait()

    async with episode(["a", never, "b", never, "c"]) as agent:
        messages = [user("one")]
        messages += [await agent.ask(*messages), user("two")]
        await impatient(*messages)
        messages += [await agent.ask(*messages), user("three")]
        await impatient(user("other"))
        await agent.ask(*messages)
    assert len(agent.trajectory.branches) == 1
    assert (agent.counts.answered, agent.counts.abandoned) == (3, 2)


async def test_requests_in_flight_at_the_end_of_an_episode_are_not_recorded_and_no_fault(caplog: Any):
    async def late(session: str) -> str | Generation:
        """One is aborted, the other one ends in the same moment."""
        await async_until(lambda: session in agent.engine.released)
        return empty("abort") if session.endswith("2") else "too late"

    async with episode(["a", late, late]) as agent:
        first = await agent.ask(user("one"))
        for messages in ([user("two")], [user("one"), first, user("go on")]):
            agent.pending.append(asyncio.create_task(agent.post(*messages)))
        await async_until(lambda: len(agent.engine.requests) == 3)
    assert [task.result()[0] for task in agent.pending] == [503, 503]
    assert agent.trajectory.loss_mask[-1]
    assert (agent.counts.answered, agent.counts.abandoned, agent.counts.branches) == (1, 2, 1)
    assert "fails" not in caplog.text


async def test_a_branch_continues_behind_a_cut_answer_with_an_end_of_the_turn_that_is_not_trained():
    async with episode([Cut("never end"), "done"]) as agent:
        _, body = await agent.post(user("one"))
        [choice] = body["choices"]
        assert choice["finish_reason"] == "length"
        await agent.ask(user("one"), choice["message"], user("go on"))
    trajectory = agent.trajectory
    assert len(trajectory.branches) == 1
    assert trajectory.finish is Finish.COMPLETED
    whole = [user("one"), says("never end"), user("go on")]
    rendered = TOKENIZER.apply_chat_template(whole, add_generation_prompt=True, tokenize=False)
    assert CHAT.text(trajectory.tokens) == rendered + "done" + END
    assert CHAT.text(trajectory.tokens[trajectory.loss_mask]) == "never end" + "done" + END
    assert [turn.finish_reason for turn in trajectory.turns] == ["", "length", "", "stop"]


@pytest.mark.parametrize(
    ("trims", "sampled", "changed", "branches"),
    [(False, "never end", ".", 2), (True, "never end", "", 1), (True, "never end ", "", 2)],
)
async def test_a_cut_answer_that_agent_or_template_change_begins_a_new_branch(
    trims: bool, sampled: str, changed: str, branches: int
):
    template = CHATML.replace("content = message.content", "content = message.content" + " | trim" * trims)
    async with episode([Cut(sampled), "done"], tokenizer=make_tokenizer(template)) as agent:
        first = await agent.ask(user("one"))
        await agent.ask(user("one"), says(first["content"] + changed), user("go on"))
    start, end = agent.trajectory.branches[0]
    assert agent.counts.branches == len(agent.trajectory.branches) == branches
    assert CHAT.text(agent.trajectory.tokens[start:end]).endswith("done" + END if branches == 1 else sampled)


async def test_two_requests_behind_one_cut_answer_both_see_its_end():
    async with episode([Cut("never end"), "a", "b"]) as agent:
        first = await agent.ask(user("one"))
        for text in ("go on", "stop it"):
            await agent.ask(user("one"), first, user(text))
    assert agent.counts.branches == 2
    assert all(f"never end{END}" in CHAT.text(request[0]) for request in agent.engine.requests[1:])


async def test_what_the_template_refuses_is_a_400_with_its_reason_and_the_episode_goes_on():
    async with episode(["done"], tokenizer=family("gemma2"), end="<end_of_turn>") as agent:
        error = await agent.refusal({"role": "system", "content": "be brief"}, user("one"))
        assert error["code"] == "invalid_request_error"
        assert "There is no system role" in error["message"]
        await agent.ask(user("be brief: one"))
    assert agent.trajectory.finish is Finish.COMPLETED
    assert agent.counts.refused == 1


async def test_two_calls_of_an_agent_in_one_turn_are_a_400_where_the_template_shows_one():
    said = "; ".join(f'{{"name": "echo", "parameters": {{"text": "{text}"}}}}' for text in "12")
    async with episode([said], tokenizer=family("llama3_1"), end="<|eot_id|>") as agent:
        answer = await agent.ask(user("one"), tools=[TOOL])
        assert "tool_calls" not in answer
        assert answer["content"] == said
        made = [{"id": name, "function": {"name": "echo", "arguments": '{"text": "1"}'}} for name in "ab"]
        results = [{"role": "tool", "tool_call_id": name, "content": "1"} for name in "ab"]
        error = await agent.refusal(user("one"), says("", tool_calls=made), *results, tools=[TOOL])
        assert "one tool call at a time" in error["message"]
    assert agent.trajectory.finish is Finish.COMPLETED


DEEP = {"function": {"name": "x", "arguments": "[" * 10**5}}
REQUESTS = [
    ({"n": 0}, "n is 0"),
    ({"n": True}, "n is True"),
    ({"n": 9}, "no room for 9 completions"),
    ({"stop": [3]}, "stop is [3]"),
    ({"stop": ["x"] * 17}, "up to 16"),
    ({"logit_bias": {"5": 100}}, "logit_bias"),
    ({"tool_choice": "always"}, "tool_choice is always"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among the tools"),
    ({"logprobs": 3}, "logprobs is 3"),
    ({"logprobs": True, "top_logprobs": 6}, "from 0 to 5"),
    ({"top_logprobs": 1}, "needs logprobs=true"),
    ({"stream": "yes"}, "stream is yes"),
    ({"stream_options": 5}, "stream_options is 5"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": "text"}, "response_format"),
    ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "cannot call them"),
    ({"guided_regex": "[ab]+"}, "guided_regex='[ab]+': give the grammar as response_format"),
    ({"regex": "[ab]+"}, "regex='[ab]+': give the grammar as response_format"),
    ({"max_tokens": 0}, "positive"),
    ({"messages": []}, "list of messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "an image is None"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "types input_audio"),
    ({"messages": [{"role": "user", "content": 5}]}, "not 5"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "a message must have a role"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls must be a list"),
    ({"messages": [{"role": "assistant", "tool_calls": [DEEP]}]}, "a tool call cannot be read"),
    ({"tools": [{"name": "x"}]}, "a tool must be"),
    ({"tools": {"name": "x"}}, "a tool must be"),
    ({"tools": [{"function": {"name": "x", "parameters": {"properties": {"y": 3}}}}]}, "a tool must be"),
    *(
        (
            {"tools": [{"function": {"name": "x", "parameters": {"$ref": "#/$defs/X", "$defs": {"X": malformed}}}}]},
            "a tool must be",
        )
        for malformed in ({"required": 5}, {"properties": ["y"]})
    ),
]
BODIES = [
    ({"data": b"{}", "headers": {"Content-Type": "application/json; charset=none-such"}}, "not JSON"),
    ({"data": b"{}", "headers": {"Content-Encoding": "gzip"}}, "not JSON"),
    ({"data": b"[" * 10**5}, "not JSON"),
    ({"data": b" " * (MAX_REQUEST_BYTES + 1)}, "more than"),
]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [*(({"json": {"messages": [user("one")], **body}}, reason) for body, reason in REQUESTS), *BODIES],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_request_that_cannot_be_read_or_recorded_or_would_change_the_policy_is_refused(sent: Any, reason: str):
    async with episode(["abcdefgh"]) as agent:
        status, answer = await agent.send(**sent)
        assert status == 400
        assert reason in answer["error"]["message"]
        await agent.ask(user("two"), max_tokens=3)
    assert agent.counts.refused == 1
    assert agent.engine.requests[-1][1].max_new_tokens == 3


async def test_text_of_an_agent_that_has_no_encoding_is_recorded_with_a_question_mark():
    async with episode(["a"]) as agent:
        await agent.ask(user("half of a pair: \ud800"))
    assert "half of a pair: ?" in TOKENIZER.decode(agent.trajectory.tokens)


async def test_a_request_without_room_or_turns_left_is_refused_with_its_code_and_the_episode_is_truncated():
    limits = replace(LIMITS, max_turns=2, max_turn_tokens=50, max_tokens=200)
    async with episode(["a", "b"], limits) as agent:
        messages = [user("one"), await agent.ask(user("one"))]
        assert (await agent.refusal(*messages, user("word " * 200)))["code"] == "context_length_exceeded"
        messages += [user("two"), await agent.ask(*messages, user("two"))]
        assert (await agent.refusal(*messages, user("three")))["code"] == "turn_limit"
    assert agent.trajectory.finish is Finish.TRUNCATED


async def test_only_the_episodes_own_key_opens_its_address():
    async with episode(["a"]) as agent:
        url, _ = await agent.address
        for other in ({"key": "guess"}, {"url": url.replace("t%2F1", "t2")}):
            assert (await agent.send(**other, json={"messages": [user("x")]}))[0] == 401
        await agent.ask(user("one"))
    assert agent.trajectory.sampled_tokens == len(ids(TOKENIZER, "a" + END))


async def test_an_agent_that_raises_or_requests_nothing_makes_no_trajectory():
    async with episode(["a"], fails=(AgentError, "I am lost")) as agent:
        await agent.ask(user("one"))
        agent.outcome = ValueError("I am lost")
    async with episode([], fails=(InvariantError, "before any request")):
        pass


@pytest.mark.parametrize("finish", ["abort", "stop"])
async def test_an_engine_that_fails_makes_no_trajectory_even_if_the_agent_hides_it(finish: str):
    async with episode(["a", empty(finish)], fails=(EngineError, "aborted")) as agent:
        await agent.ask(user("one"))
        assert (await agent.post(user("two")))[0] == 503


async def test_an_agent_reads_the_engines_error_without_passwords() -> None:
    async def fails(session: str) -> str:
        raise EngineError("http://user:hidden1@engine:30000 does not answer")

    async with episode([fails], fails=(EngineError, "does not answer")) as agent:
        status, answer = await agent.post(user("one"))
        assert status == 503
        assert "does not answer" in answer["error"]["message"]
        assert "hidden1" not in answer["error"]["message"]


async def test_seconds_in_which_several_completions_are_sampled_count_once() -> None:
    now = 0.0

    async def sampled(session: str) -> str:
        nonlocal now
        now += 1
        return "a"

    async with episode([sampled] * 8, clock=lambda: now) as agent:
        await agent.ask(user("one"), n=8)
        now += 3
    assert agent.trajectory.timings == {"wait": 0.0, "generate": 8.0, "agent": 3.0}


async def my_agent(task: Task, base_url: str, api_key: str) -> None:
    """An agent to be found by its path."""


async def agent_of_two(task: Task, base_url: str) -> None:
    """An agent that cannot be called as episodes do."""


async def polite(task: Task, base_url: str, api_key: str, how: int = 1) -> dict[str, float]:
    """An agent with an option."""
    return {"polite": float(how)}


class Polite:
    """Agents that are objects."""

    def __init__(self, how: int) -> None:
        if how > 9:
            raise ValueError("no agent is so polite")
        self.how = how

    def __call__(self, task: Task, base_url: str, api_key: str) -> dict[str, float]:
        return {"polite": float(self.how)}


def test_an_agent_is_found_by_its_path_and_refused_with_the_fix():
    assert load_agent("tests.agents.chat_api.test_agent.my_agent", {}) is my_agent
    for path, reason in (
        ("nowhere.agent", "cannot be imported"),
        ("asyncrl.types.Task", "agent_options"),
        ("tests.agents.chat_api.test_agent.agent_of_two", "async def"),
        ("x", "imported"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_agent(path, {})


@pytest.mark.parametrize("name", ["polite", "Polite"])
async def test_an_agent_gets_its_options_and_is_refused_with_others(name: str):
    path = f"tests.agents.chat_api.test_agent.{name}"
    agent = load_agent(path, {"how": 3})
    assert await agent(make_ticket("t/1").task, "", "") == {"polite": 3.0}
    with pytest.raises(ConfigError, match=r"loud.*agent_options|agent_options.*loud"):
        load_agent(path, {"how": 3, "loud": True})
    with pytest.raises(ConfigError, match=r"agent_options.*no agent is so polite"):
        load_agent("tests.agents.chat_api.test_agent.Polite", {"how": 10})


async def test_metrics_of_an_agent_are_averaged_and_are_no_rewards() -> None:
    async with episode(["15"]) as agent:
        await agent.ask(user("one"))
        agent.outcome = AgentResult({"polite": 1.0}, {"searches": 3})
    assert agent.trajectory.rewards == {"polite": 1.0}
    assert agent.player.counters()["agent/searches"] == 3.0
    assert "agent/searches" not in agent.player.counters()


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (AgentResult(metrics={"a b": 1.0}), "metric 'a b'"),
        (AgentResult(metrics={"x": float("nan")}), "metric 'x' is nan"),
        (AgentResult({"x": float("nan")}), "rewards are .*use finite numbers"),
        ({"x": float("-inf")}, "rewards are .*use finite numbers"),
        (AgentResult(metrics={f"m{number}": 0.0 for number in range(MAX_METRICS + 1)}), "33 metrics"),
        (AgentResult(metrics={"x": "many"}), "must return numbers by name"),
        (0.5, "must return numbers by name"),
        (0.0, "must return numbers by name"),
        (False, "must return numbers by name"),
    ],
)
async def test_what_an_agent_must_not_return_fails_the_episode_with_the_reason(returned: Any, reason: str) -> None:
    async with episode(["15"], fails=(AgentError, reason)) as agent:
        await agent.ask(user("one"))
        agent.outcome = returned


@pytest.mark.parametrize(
    ("name", "end", "call_text", "id", "answer_text", "reasoning", "content"),
    [
        (
            "kimi_k2_thinking",
            "<|im_end|>",
            "<think>a</think>Look.<|tool_call_begin|>functions.echo:4<|tool_call_argument_begin|>"
            '{"text": "x"}<|tool_call_end|>',
            "functions.echo:4",
            "<think>b</think>done",
            "a",
            "Look.",
        ),
        (
            "gpt_oss",
            "<|call|>",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
            ' to=functions.echo<|channel|>commentary json<|message|>{"text": "x"}',
            None,
            "<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>done",
            "a",
            None,
        ),
        (
            "mistral_small_3_2",
            "</s>",
            'Look.[TOOL_CALLS]echo[CALL_ID]Ab3dEf6h9[ARGS]{"text": "x"}',
            "Ab3dEf6h9",
            "done",
            None,
            "Look.",
        ),
    ],
)
@pytest.mark.parametrize("repeats_reasoning", [True, False])
async def test_an_agent_gets_a_familys_calls_ids_and_reasoning_and_its_episode_stays_one_branch(
    name: str,
    end: str,
    call_text: str,
    id: str | None,
    answer_text: str,
    reasoning: str | None,
    content: str | None,
    repeats_reasoning: bool,
) -> None:
    async with episode([call_text, answer_text, answer_text], tokenizer=family(name), end=end) as agent:
        made = await agent.ask(user("one"), tools=[TOOL])
        assert (made.get("reasoning_content"), made["content"]) == (reasoning, content)
        [requested] = made["tool_calls"]
        assert id is None or requested["id"] == id
        history = [user("one"), made, {"role": "tool", "tool_call_id": requested["id"], "content": "r"}]
        answer = await agent.ask(*history, tools=[TOOL])
        assert answer["content"] == "done"
        history += [answer, user("two")]
        if not repeats_reasoning:
            history = [{key: each[key] for key in each if key != "reasoning_content"} for each in history]
        await agent.ask(*history, tools=[TOOL])
    assert len(agent.trajectory.branches) == 1
    text = family(name).decode(agent.trajectory.tokens.tolist())
    assert id is None or id in text.partition(call_text)[2]


async def test_tools_of_a_template_in_no_known_form_are_refused_with_the_key_to_set() -> None:
    async with episode(["done"], tokenizer=family("command_r"), end="<|END_OF_TURN_TOKEN|>") as agent:
        refused = await agent.refusal(user("one"), tools=[TOOL])
        assert "actor.tool_call_format" in refused["message"]
        await agent.ask(user("one"))


async def test_a_request_with_a_response_format_is_sampled_under_its_grammar_and_recorded_so():
    said = ids(TOKENIZER, '{"a": "x"}' + END)
    count = len(said)
    logprobs, versions = np.full(count, -0.5, np.float32), np.full(count, 3, np.int32)
    under = Generation(said, logprobs, versions, "stop", np.linspace(0, 1, count, dtype=np.float32))
    async with episode(["free", under, "free again"]) as agent:
        first = await agent.ask(user("one"))
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
        answer = await agent.ask(user("one"), first, user("two"), response_format=form)
        await agent.ask(user("one"), first, user("two"), answer, user("three"))
    assert answer == says('{"a": "x"}')
    samplings = [sampling.grammar for _, sampling, *_ in agent.engine.requests]
    assert samplings == [None, Grammar("json_schema", '{"type": "object"}'), None]
    turns = [turn for turn in agent.trajectory.turns if turn.role is Role.ASSISTANT]
    assert [turn.grammar for turn in turns] == ["", "json_schema", ""]
    mass = np.ones(len(agent.trajectory), np.float32)
    mass[turns[1].start : turns[1].end] = under.grammar_mass
    np.testing.assert_array_equal(agent.trajectory.grammar_mass, mass)


async def test_an_engine_without_grammars_refuses_a_response_format_and_the_episode_goes_on():
    async with episode(["free"]) as agent:
        agent.engine.takes_grammars = False
        refused = await agent.refusal(user("one"), response_format={"type": "json_object"})
        assert "samples without grammars" in refused["message"]
        await agent.ask(user("one"))
    assert agent.trajectory.grammar_mass.size == 0
