"""An agent that speaks the chat-completions API becomes an episode, token for token, whatever it does to its past."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import pytest

from asyncrl.actor.chat import Chat
from asyncrl.actor.chat_api.agent import Agent, AgentError, AgentPlayer, load_agent
from asyncrl.actor.chat_api.server import MAX_REQUEST_BYTES, ChatCounts, ChatServer
from asyncrl.actor.engine.base import Generation
from asyncrl.actor.episode import EpisodeRunner
from asyncrl.actor.recorder import EpisodeLimits
from asyncrl.errors import ConfigError, EngineError, InvariantError
from asyncrl.types import Finish, Role, Task, Trajectory
from tests.actor.fakes import CHATML, END, QWEN3, Cut, ScriptedEngine, call, ids, make_ticket, make_tokenizer
from tests.helpers import GENEROUS_S
from tests.templates.families import tokenizer as family

TOKENIZER = make_tokenizer(CHATML)
CHAT = Chat(TOKENIZER)
LIMITS = EpisodeLimits(max_turns=8, max_turn_tokens=400, max_tokens=4000, max_total_tokens=40_000)
TOOL = {
    "type": "function",
    "function": {"name": "echo", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}

Post = Callable[..., Awaitable[tuple[int, Any]]]
Play = Callable[[Post], Awaitable[dict[str, float] | None]]


def agent_of(play: Play) -> Agent:
    async def agent(task: Task, base_url: str, api_key: str) -> dict[str, float] | None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:

            async def post(messages: list[Any], **body: Any) -> tuple[int, Any]:
                async with session.post(f"{base_url}/chat/completions", json={"messages": messages, **body}) as answer:
                    if answer.content_type == "application/json":
                        return answer.status, await answer.json()
                    return answer.status, await answer.text()

            return await play(post)

    return agent


def run(
    script: list[Any],
    play: Play,
    limits: EpisodeLimits = LIMITS,
    tokenizer: Any = TOKENIZER,
    end: str = END,
    **options: Any,
) -> tuple[Trajectory, ScriptedEngine, ChatCounts]:
    chat = CHAT if tokenizer is TOKENIZER else Chat(tokenizer)
    engine = ScriptedEngine(tokenizer, script, end=end)
    trajectory, counts = play_with(engine, agent_of(play), limits, chat, **options)
    return trajectory, engine, counts


def play_with(
    engine: ScriptedEngine,
    agent: Agent,
    limits: EpisodeLimits = LIMITS,
    chat: Chat = CHAT,
    left: Sequence[asyncio.Task[Any]] = (),
    **options: Any,
) -> tuple[Trajectory, ChatCounts]:
    """The trajectory of an episode that `agent` plays; `left` are tasks of its own that end later."""

    async def scenario() -> tuple[Trajectory, ChatCounts]:
        server = ChatServer()
        await server.start()
        try:
            runner = EpisodeRunner(engine, chat, AgentPlayer(agent, server), limits, **options)
            trajectory = await runner.run(make_ticket("t/1"), lambda: None)
            await asyncio.gather(*left)
            return trajectory, server.counts
        finally:
            await server.close()

    trajectory, counts = asyncio.run(asyncio.wait_for(scenario(), GENEROUS_S))
    assert_follows_its_requests(trajectory, engine)
    return trajectory, counts


def assert_follows_its_requests(trajectory: Trajectory, engine: ScriptedEngine) -> None:
    """The tokens before an answer in its branch are the engine's prompt, and every session was released."""
    given = {tuple(sampled.tokens): prompt for prompt, sampled in engine.answered}
    for start, end in trajectory.branches:
        for turn in trajectory.turns:
            if turn.role is Role.ASSISTANT and start <= turn.start < end:
                np.testing.assert_array_equal(
                    given[tuple(trajectory.tokens[turn.start : turn.end])], trajectory.tokens[start : turn.start]
                )
    assert {request[3] for request in engine.requests} <= set(engine.released)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def message_of(answer: tuple[int, Any]) -> dict[str, Any]:
    status, body = answer
    assert status == 200, body
    return dict(body["choices"][0]["message"])


def assert_as_sampled(trajectory: Trajectory, generations: list[Generation]) -> None:
    """The trained tokens are those of `generations`, with their log-probs and versions."""
    mask = trajectory.loss_mask
    for name in ("tokens", "logprobs", "versions"):
        expected = np.concatenate([getattr(each, name) for each in generations])
        np.testing.assert_array_equal(getattr(trajectory, name)[mask], expected)


def test_a_conversation_that_only_grows_is_one_trajectory_of_the_templates_own_tokens():
    async def play(post: Post) -> dict[str, float]:
        messages: list[Any] = [user("5*3?")]
        first = message_of(await post(messages, tools=[TOOL]))
        [made] = first["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"text": "15"}
        messages += [first, {"role": "tool", "tool_call_id": made["id"], "content": "15"}]
        second = message_of(await post(messages, tools=[TOOL]))
        assert second["content"] == "fifteen"
        messages += [{**second, "refusal": None}, {"role": "user", "content": [{"type": "text", "text": "sure?"}]}]
        assert message_of(await post(messages, tools=[TOOL]))["content"] == "yes"
        return {"polite": 1}

    trajectory, engine, counts = run(["hm " + call("15"), "fifteen", "yes"], play)
    assert_as_sampled(trajectory, engine.sampled)
    assert trajectory.id == "t/1"
    assert trajectory.finish is Finish.COMPLETED
    assert trajectory.rewards == {"polite": 1.0}
    roles = [turn.role for turn in trajectory.turns]
    assert roles == [Role.PROMPT, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    conversation = [
        user("5*3?"),
        {
            "role": "assistant",
            "content": "hm",
            "tool_calls": [{"type": "function", "function": {"name": "echo", "arguments": {"text": "15"}}}],
        },
        {"role": "tool", "name": "echo", "content": "15"},
        {"role": "assistant", "content": "fifteen"},
        user("sure?"),
    ]
    whole = TOKENIZER.apply_chat_template(conversation, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    text = CHAT.text(trajectory.tokens)
    assert text == whole.replace("hm\n<tool_call>", "hm <tool_call>") + "yes" + END
    assert counts.branches == 1
    assert len({request[3] for request in engine.requests}) == 1


def test_an_agent_that_summarises_its_history_trains_all_of_it_and_its_last_completion_is_last():
    async def play(post: Post) -> None:
        asked = [user("dig"), message_of(await post([user("dig")], tools=[TOOL]))]
        result = {"role": "tool", "tool_call_id": asked[1]["tool_calls"][0]["id"], "content": "gold"}
        summary = message_of(await post([user("sum up: gold was found")]))["content"]
        assert message_of(await post([user(summary), user("go on")]))["content"] == "sold it"
        assert message_of(await post([*asked, result], tools=[TOOL]))["content"] == "done"

    trajectory, engine, counts = run([call("gold"), "there is gold", "sold it", "done"], play)
    one, two, three, four = engine.sampled
    assert_as_sampled(trajectory, [two, three, one, four])
    assert [turn.tool_calls[0].arguments for turn in trajectory.turns if turn.tool_calls] == [{"text": "gold"}]
    assert len(trajectory.steps) == 4
    assert trajectory.finish is Finish.COMPLETED
    assert counts.branches == len(trajectory.branches) == 3


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"max_turn_tokens": 20, "max_total_tokens": 100}, "context_length_exceeded"), ({"max_turns": 3}, "turn_limit")],
)
def test_limits_hold_however_many_requests_come_at_once(limits: dict[str, int], code: str):
    async def play(post: Post) -> None:
        answers = await asyncio.gather(*(post([user(f"number {index}")]) for index in range(8)))
        refused.extend(body["error"]["code"] for status, body in answers if status != 200)

    refused: list[str] = []
    script = [f"{index} is a number" for index in range(8)]
    trajectory, engine, counts = run(script, play, replace(LIMITS, **limits))
    assert len(trajectory) <= limits.get("max_total_tokens", len(trajectory))
    assert len(trajectory.branches) <= limits.get("max_turns", 8)
    assert_as_sampled(trajectory, engine.sampled)
    assert trajectory.finish is Finish.TRUNCATED
    assert set(refused) == {code}
    assert counts.refused == len(refused) == 8 - counts.answered < 6


def test_a_request_that_the_agent_did_not_wait_for_leaves_nothing_behind():
    begun, gave_up = asyncio.Event(), asyncio.Event()

    class Slow(ScriptedEngine):
        async def generate(self, tokens: Any, sampling: Any, stop: Any, session: str) -> Generation:
            if len(self.requests) in (1, 3) and not gave_up.is_set():
                self.requests.append((tokens, sampling, stop, session))
                begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    gave_up.set()
            return await super().generate(tokens, sampling, stop, session)

    engine = Slow(TOKENIZER, ["a", "never", "b", "never", "c"])

    async def impatient(post: Post, messages: list[Any]) -> None:
        begun.clear()
        gave_up.clear()
        asking = asyncio.ensure_future(post(messages))
        await asyncio.wait_for(begun.wait(), GENEROUS_S)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(gave_up.wait(), GENEROUS_S)

    async def play(post: Post) -> None:
        messages = [user("one")]
        messages += [message_of(await post(messages)), user("two")]
        await impatient(post, messages)
        messages += [message_of(await post(messages)), user("three")]
        await impatient(post, [user("other")])
        message_of(await post(messages))

    trajectory, counts = play_with(engine, agent_of(play))
    assert_as_sampled(trajectory, engine.sampled)
    assert len(trajectory.branches) == 1
    assert (counts.answered, counts.abandoned) == (3, 2)


def test_requests_in_flight_at_the_end_of_an_episode_are_not_recorded_and_no_fault(caplog: Any):
    class Hanging(ScriptedEngine):
        async def generate(self, tokens: Any, sampling: Any, stop: Any, session: str) -> Generation:
            if not self.requests:
                return await super().generate(tokens, sampling, stop, session)
            self.requests.append((tokens, sampling, stop, session))
            while session not in self.released:
                await asyncio.sleep(0)
            # One was aborted, the other one ended in the same moment.
            none = np.zeros(0, np.int32)
            aborted = Generation(none, none.astype(np.float32), none, "abort")
            return aborted if session.endswith("2") else self.say("too late", 100)

    engine = Hanging(TOKENIZER, ["a"])
    left: list[asyncio.Task[Any]] = []

    async def leaves(task: Task, base_url: str, api_key: str) -> None:
        async def post(session: aiohttp.ClientSession, messages: list[Any]) -> tuple[int, Any]:
            async with session.post(f"{base_url}/chat/completions", json={"messages": messages}) as answer:
                return answer.status, await answer.json()

        async def stay(messages: list[Any]) -> int:
            async with aiohttp.ClientSession(headers=headers) as session:
                return (await post(session, messages))[0]

        headers = {"Authorization": f"Bearer {api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            first = message_of(await post(session, [user("one")]))
        requests = ([user("two")], [user("one"), first, user("go on")])
        left.extend(asyncio.create_task(stay(messages)) for messages in requests)
        while len(engine.requests) < 3:
            await asyncio.sleep(0)

    trajectory, counts = play_with(engine, leaves, left=left)
    assert [task.result() for task in left] == [503, 503]
    assert_as_sampled(trajectory, engine.sampled)
    assert trajectory.loss_mask[-1]
    assert (counts.answered, counts.abandoned, counts.branches) == (1, 2, 1)
    assert "fails" not in caplog.text


def test_a_branch_continues_behind_a_cut_answer_with_an_end_of_the_turn_that_is_not_trained():
    async def play(post: Post) -> None:
        status, body = await post([user("one")])
        assert body["choices"][0]["finish_reason"] == "length"
        message_of(await post([user("one"), message_of((status, body)), user("go on")]))

    trajectory, engine, counts = run([Cut("never end"), "done"], play)
    assert counts.branches == 1
    assert trajectory.finish is Finish.COMPLETED
    assert_as_sampled(trajectory, engine.sampled)
    whole = [user("one"), {"role": "assistant", "content": "never end"}, user("go on")]
    rendered = TOKENIZER.apply_chat_template(whole, add_generation_prompt=True, tokenize=False)
    assert CHAT.text(trajectory.tokens) == rendered + "done" + END
    assert [turn.finish_reason for turn in trajectory.turns] == ["", "length", "", "stop"]
    [end] = ids(TOKENIZER, END)
    cut_at = trajectory.turns[1].end
    assert trajectory.tokens[cut_at] == end
    assert not trajectory.loss_mask[cut_at]


def test_a_cut_answer_that_the_agent_changes_begins_a_new_branch():
    async def play(post: Post) -> None:
        first = message_of(await post([user("one")]))
        message_of(await post([user("one"), {**first, "content": first["content"] + "."}, user("go on")]))

    trajectory, _, counts = run([Cut("never end"), "done"], play)
    assert counts.branches == 2
    assert CHAT.text(trajectory.tokens[: trajectory.branches[0][1]]).endswith("never end")


def test_two_requests_behind_one_cut_answer_both_see_its_end():
    async def play(post: Post) -> None:
        first = message_of(await post([user("one")]))
        for text in ("go on", "stop it"):
            message_of(await post([user("one"), first, user(text)]))

    trajectory, engine, counts = run([Cut("never end"), "a", "b"], play)
    assert counts.branches == 2
    assert all(f"never end{END}" in CHAT.text(request[0]) for request in engine.requests[1:])
    assert trajectory.sampled_tokens == sum(len(each.tokens) for each in engine.sampled)


def test_a_cut_answer_that_the_template_changes_begins_a_new_branch():
    async def play(post: Post) -> None:
        first = message_of(await post([user("one")]))
        message_of(await post([user("one"), first, user("go on")]))

    trimming = make_tokenizer(CHATML.replace("content = message.content", "content = message.content | trim"))
    for text, branches in (("never end", 1), ("never end ", 2)):
        _, _, counts = run([Cut(text), "done"], play, tokenizer=trimming)
        assert counts.branches == branches


@pytest.mark.parametrize(("as_rendered", "branches"), [(False, 1), (True, 2)])
def test_history_is_what_was_sampled_or_what_the_template_renders(as_rendered: bool, branches: int):
    async def play(post: Post) -> None:
        first = message_of(await post([user("one")]))
        message_of(await post([user("one"), first, user("go on")]))

    tokenizer = make_tokenizer(QWEN3)
    script = ["<think>\nwell\n</think>\n\none", "<think>\n\n</think>\n\ntwo"]
    trajectory, engine, _ = run(script, play, tokenizer=tokenizer, as_rendered=as_rendered)
    assert len(trajectory.branches) == branches
    assert_as_sampled(trajectory, engine.sampled)
    seen = CHAT.text(engine.requests[-1][0])
    assert ("well" in seen) == (not as_rendered)
    if as_rendered:
        messages = [user("one"), {"role": "assistant", "content": script[0]}, user("go on")]
        assert seen == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def test_what_the_template_refuses_is_a_400_with_its_reason_and_the_episode_goes_on():
    async def play(post: Post) -> None:
        status, body = await post([{"role": "system", "content": "be brief"}, user("one")])
        assert (status, body["error"]["code"]) == (400, "invalid_request_error")
        assert "There is no system role" in body["error"]["message"]
        message_of(await post([user("be brief: one")]))

    trajectory, _, counts = run(["done"], play, tokenizer=family("gemma2"), end="<end_of_turn>")
    assert trajectory.finish is Finish.COMPLETED
    assert counts.refused == 1


def test_two_calls_of_an_agent_in_one_turn_are_a_400_where_the_template_shows_one():
    async def play(post: Post) -> None:
        answer = message_of(await post([user("one")], tools=[TOOL]))
        assert "tool_calls" not in answer
        assert answer["content"].count("<tool_call>") == 2
        made = [{"id": name, "function": {"name": "echo", "arguments": '{"text": "1"}'}} for name in "ab"]
        turn = {"role": "assistant", "content": "", "tool_calls": made}
        results = [{"role": "tool", "tool_call_id": name, "content": "1"} for name in "ab"]
        status, body = await post([user("one"), turn, *results], tools=[TOOL])
        assert status == 400
        assert "one tool call at a time" in body["error"]["message"]

    trajectory, _, _ = run([call("1") + call("2")], play, tokenizer=family("llama3_1"), end="<|eot_id|>")
    assert trajectory.finish is Finish.COMPLETED


def test_a_client_that_streams_gets_the_same_in_one_piece():
    async def play(post: Post) -> None:
        status, text = await post([user("one")], stream=True)
        events = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert status == 200
        assert events[-1] == "[DONE]"
        assert json.loads(events[0])["choices"][0]["delta"]["content"] == "a"

    assert run(["a"], play)[0].sampled_tokens


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"n": 2}, "n=2"),
        ({"stop": ["x"]}, "stop="),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 0}, "positive"),
        ({"messages": []}, "list of messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "a message must have a role"),
        ({"tools": [{"name": "x"}]}, "a tool must be"),
        ({"tools": {"name": "x"}}, "a tool must be"),
        ({"tools": [{"function": {"name": "x", "parameters": {"properties": {"y": 3}}}}]}, "a tool must be"),
        ({"response_format": "text"}, "response_format"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls must be a list"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "[" * 10**5}}]}
                ]
            },
            "a tool call cannot be read",
        ),
    ],
)
def test_a_request_that_would_change_the_policy_or_cannot_be_recorded_is_refused_with_the_reason(body, reason):
    async def play(post: Post) -> None:
        status, answer = await post(**{"messages": [user("one")], **body})
        assert status == 400
        assert reason in answer["error"]["message"]
        message_of(await post([user("two")], max_tokens=3))

    _, engine, counts = run(["abcdefgh", "abcdefgh"], play)
    assert counts.refused == 1
    assert engine.requests[-1][1].max_new_tokens == 3


@pytest.mark.parametrize(
    ("body", "headers", "reason"),
    [
        (b"{}", {"Content-Type": "application/json; charset=none-such"}, "not JSON"),
        (b"{}", {"Content-Encoding": "gzip"}, "not JSON"),
        (b"[" * 10**5, {}, "not JSON"),
        (b" " * (MAX_REQUEST_BYTES + 1), {}, "more than"),
    ],
    ids=["charset", "encoding", "nesting", "size"],
)
def test_a_body_that_cannot_be_read_is_refused_and_the_episode_goes_on(body: bytes, headers: Any, reason: str):
    async def agent(task: Task, base_url: str, api_key: str) -> None:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session,
            session.post(f"{base_url}/chat/completions", data=body, headers=headers) as answer,
        ):
            assert answer.status == 400
            assert reason in (await answer.json())["error"]["message"]
        await agent_of(play)(task, base_url, api_key)

    async def play(post: Post) -> None:
        message_of(await post([user("one")]))

    assert play_with(ScriptedEngine(TOKENIZER, ["a"]), agent)[1].refused == 1


def test_text_of_an_agent_that_has_no_encoding_is_recorded_with_a_question_mark():
    async def play(post: Post) -> None:
        message_of(await post([user("half of a pair: \ud800")]))

    trajectory, _, counts = run(["a"], play)
    assert "half of a pair: ?" in TOKENIZER.decode(trajectory.tokens)
    assert counts.refused == 0


def test_a_request_without_room_or_turns_left_is_refused_with_its_code_and_the_episode_is_truncated():
    async def play(post: Post) -> None:
        first = message_of(await post([user("one")]))
        status, answer = await post([user("one"), first, user("word " * 200)])
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        second = message_of(await post([user("one"), first, user("two")]))
        status, answer = await post([user("one"), first, user("two"), second, user("three")])
        assert (status, answer["error"]["code"]) == (400, "turn_limit")

    trajectory, engine, _ = run(["a", "b"], play, replace(LIMITS, max_turns=2, max_turn_tokens=50, max_tokens=200))
    assert trajectory.finish is Finish.TRUNCATED
    assert_as_sampled(trajectory, engine.sampled)


def test_only_the_episodes_own_key_opens_its_address():
    async def play(post: Post) -> None:
        message_of(await post([user("one")]))

    async def nosy(task: Task, base_url: str, api_key: str) -> None:
        for url, key in ((base_url, "guess"), (base_url.replace("t%2F1", "t2"), api_key)):
            headers = {"Authorization": f"Bearer {key}"}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(f"{url}/chat/completions", json={"messages": [user("x")]}) as answer,
            ):
                assert answer.status == 401
        await agent_of(play)(task, base_url, api_key)

    trajectory, _ = play_with(ScriptedEngine(TOKENIZER, ["a"]), nosy)
    assert trajectory.sampled_tokens == len(ids(TOKENIZER, "a" + END))


def test_an_agent_that_raises_or_requests_nothing_and_an_engine_that_fails_make_no_trajectory():
    async def raises(post: Post) -> None:
        message_of(await post([user("one")]))
        raise ValueError("I am lost")

    async def silent(post: Post) -> None:
        pass

    async def swallows(post: Post) -> None:
        message_of(await post([user("one")]))
        status, _ = await post([user("two")])
        assert status == 503

    for finish in ("abort", "stop"):
        empty = Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), finish)
        for play, error, reason in (
            (raises, AgentError, "I am lost"),
            (silent, InvariantError, "before any request"),
            (swallows, EngineError, "aborted"),
        ):
            with pytest.raises(error, match=reason):
                run(["a", empty], play)


async def my_agent(task: Task, base_url: str, api_key: str) -> None:
    """An agent to be found by its path."""


def test_an_agent_is_found_by_its_path_and_refused_with_the_fix():
    assert load_agent("tests.actor.chat_api.test_server.my_agent") is my_agent
    for path, reason in (
        ("nowhere.agent", "cannot be imported"),
        ("asyncrl.types.Task", "async def"),
        ("x", "imported"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_agent(path)
