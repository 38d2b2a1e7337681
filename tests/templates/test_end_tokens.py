"""A turn that a further end token ends: the record has what was sampled, and the template's own mark follows it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncrl.chat.chat import Chat
from asyncrl.chat.formats.base import WrittenCall
from asyncrl.chat.messages import read_messages
from asyncrl.data.demonstrations import Demonstration
from asyncrl.engine.base import Generation
from asyncrl.episode.demonstrations import demonstration_tokens
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.episode.recorder import CompletionRequest, Recorder
from asyncrl.scoring.answers import answer_texts
from asyncrl.types import NO_VERSION, Finish, Role, ToolCall
from tests.agents.chat_api.support import episode as agents_episode
from tests.agents.chat_api.support import user
from tests.episode.fakes import ScriptedEngine, assert_trains_what_was_sampled, make_ticket, make_tool, play_with_tools
from tests.templates.families import tokenizer

FURTHER = {
    "qwen3": ("<|endoftext|>", "<|im_end|>"),
    "llama3_1": ("<|end_of_text|>", "<|eot_id|>"),
    "kimi_k2": ("[EOS]", "<|im_end|>"),
    "glm4_5": ("<|endoftext|>", "<|observation|>"),
    "gpt_oss": ("<|endoftext|>", "<|call|>"),
}
"""A further end token of each family, and the template's mark after a call."""
WITHOUT_TOOLS = {
    "gemma3": ("<eos>", "<end_of_turn>"),
    "phi3_5": ("<|endoftext|>", "<|end|>"),
    "phi4": ("<|endoftext|>", "<|im_end|>"),
    "qwen2_5": ("<|endoftext|>", "<|im_end|>"),
    "glm4_5": ("<|endoftext|>", "<|user|>"),
}
"""A further end token of each family, and the template's mark after an answer."""


def chat_of(name: str, further: str) -> Chat:
    made = tokenizer(name)
    return Chat(made, further_ends=[made.convert_tokens_to_ids(further)])


def said(name: str, text: str, end: str) -> Generation:
    tokens = np.asarray(tokenizer(name).encode(text + end, add_special_tokens=False), np.int32)
    assert tokens[-1] == tokenizer(name).convert_tokens_to_ids(end)
    count = len(tokens)
    return Generation(tokens, np.full(count, -0.5, np.float32), np.full(count, 3, np.int32), "stop")


@pytest.mark.parametrize("name", FURTHER)
def test_a_call_and_an_answer_may_end_with_each_end_token(name: str) -> None:
    further, mark = FURTHER[name]
    chat = chat_of(name, further)
    assert chat.format is not None
    text = chat.format.write([WrittenCall("search", {"text": "é"})])
    cls, log = make_tool(name="search")
    own_end = chat.text([chat.stop_ids[0]])
    texts, turns = {}, {}
    for call_end in (mark, further):
        for answer_end in (own_end, further):
            engine = ScriptedEngine(tokenizer(name), [said(name, text, call_end), said(name, "done", answer_end)])
            trajectory = asyncio.run(play_with_tools(engine, chat, {"search": cls}, make_ticket()))
            assert_trains_what_was_sampled(trajectory, engine)
            assert all(tokenizer(name).convert_tokens_to_ids(further) in stop for _, _, stop, _ in engine.requests)
            assert trajectory.finish is Finish.COMPLETED
            assert [call for turn in trajectory.turns for call in turn.tool_calls] == [
                ToolCall("search", {"text": "é"})
            ]
            assert [turn.finish_reason for turn in trajectory.turns if turn.role is Role.ASSISTANT] == ["stop", "stop"]
            assert answer_texts(trajectory, tokenizer(name))[0] == "done"
            whole = chat.text(trajectory.tokens)
            assert whole.endswith(answer_end)
            texts[call_end, answer_end] = whole.removesuffix(answer_end)
            turns[call_end] = trajectory
    assert len(log.executed) == 4
    # What is between the turns is the template's own rendering, after the token that was sampled in place of its mark.
    assert {each.replace(further + mark, mark) for each in texts.values()} == {texts[mark, own_end]}
    other = turns[further]
    tool = next(turn for turn in other.turns if turn.role is Role.TOOL)
    assert other.tokens[tool.start - 1] == tokenizer(name).convert_tokens_to_ids(further)
    assert other.tokens[tool.start] == tokenizer(name).convert_tokens_to_ids(mark)
    assert other.versions[tool.start] == NO_VERSION
    assert other.loss_mask[tool.start - 1 : tool.start + 1].tolist() == [True, False]


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_later_turns_are_the_templates_own_rendering_but_for_the_token_that_was_sampled(name: str) -> None:
    further, mark = WITHOUT_TOOLS[name]
    chat, made = chat_of(name, further), tokenizer(name)
    ends = [further, chat.text([chat.stop_ids[0]])]
    first, sure = user("5*3?"), user("sure?")
    recorder = Recorder(make_ticket(), EpisodeLimits(8, 400, 4000, 40_000), chat)
    messages: list[dict[str, str]] = [first]
    for text, end, following in (("15", ends[0], sure), ("yes", ends[1], None)):
        reservation = recorder.reserve(CompletionRequest(read_messages(messages), ()))
        answer = {"role": "assistant", "content": text}
        written = chat.written([*read_messages(messages), answer], ())
        recorder.record(reservation, said(name, chat.text(written[:-1]), end), answer, [])
        messages += [answer, *([following] if following else [])]
    trajectory = recorder.trajectory({}, {}, "turn")
    tokens = trajectory.tokens.tolist()
    at = tokens.index(made.convert_tokens_to_ids(further))
    assert trajectory.loss_mask[at : at + 2].tolist() == [True, False]
    assert trajectory.versions[at : at + 2].tolist() == [3, NO_VERSION]
    assert tokens[at + 1] == made.convert_tokens_to_ids(mark)
    rendered = chat.rendered(read_messages(messages), ()).tolist()
    assert tokens[:at] + tokens[at + 1 :] == rendered


async def test_an_agent_reads_a_turn_without_its_end_token_and_the_finish_reason_stop() -> None:
    async with agents_episode(["done"], tokenizer=tokenizer("qwen3"), end="<|endoftext|>") as agent:
        status, answer = await agent.post(user("5*3?"))
        assert status == 200
        [choice] = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "done")


def test_a_demonstration_ends_its_turns_as_the_template_does() -> None:
    further, mark = FURTHER["qwen3"]
    shown = Demonstration([user("5*3?"), {"role": "assistant", "content": "15"}], ())
    for chat in (chat_of("qwen3", further), Chat(tokenizer("qwen3"))):
        tokens, mask = demonstration_tokens(chat, shown, {})
        assert chat.text(tokens[mask]).endswith("15" + mark)
