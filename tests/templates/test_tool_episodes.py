"""Episodes with tools in every family's own format: what is recorded is the family's rendering, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.chat.formats.base import WrittenCall
from asyncrl.chat.messages import read_messages
from asyncrl.data.demonstrations import Demonstration
from asyncrl.engine.base import Generation
from asyncrl.episode.demonstrations import demonstration_tokens
from asyncrl.scoring.answers import answer_texts
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import Finish, ToolCall
from tests.episode.fakes import ScriptedEngine, assert_trains_what_was_sampled, make_ticket, make_tool, play_with_tools
from tests.helpers import GENEROUS_S
from tests.templates.families import tokenizer
from tests.templates.test_templates import REFUSED, REWRITTEN, SPOKEN, as_written, chat_of, rendered

FORMAT_OF = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwq": "hermes",
    "hermes3": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "llama3_3": "llama3",
    "mistral_nemo": "mistral",
    "mistral_small_3_2": "mistral_v11",
    "devstral": "mistral_v11",
    "deepseek_v3": "deepseek_v3",
    "deepseek_r1_distill": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v3_1",
    "glm4_5": "glm",
    "gpt_oss": "harmony",
    "kimi_k2": "kimi",
    "kimi_k2_thinking": "kimi",
}
STOPS = {
    "llama3": ["<|eot_id|>", "<|eom_id|>"],
    "glm": ["<|user|>", "<|observation|>", "<|endoftext|>"],
    "harmony": ["<|return|>", "<|call|>"],
    "kimi": ["<|im_end|>"],
    "mistral_v11": ["</s>"],
    "deepseek_v3_1": ["<｜end▁of▁sentence｜>"],
}
CONVERSATIONS = [
    (name, what)
    for name in FORMAT_OF
    for what in ("text before a call", "several calls at once", "calls one after another")
    if what not in REWRITTEN.get(name, set()) | REFUSED.get(name, set())
]


def sampled(tokens: Sequence[int] | NDArray[np.int32]) -> Generation:
    array = np.asarray(tokens, np.int32)
    return Generation(array, np.zeros(len(array), np.float32), np.zeros(len(array), np.int32), "stop")


@pytest.mark.parametrize("name", FORMAT_OF)
def test_the_format_and_the_stop_tokens_come_from_the_template(name: str):
    chat = chat_of(name)
    assert chat.format is not None
    assert chat.format.name == FORMAT_OF[name]
    stops = tokenizer(name).convert_ids_to_tokens(list(chat.stop_ids))
    assert stops == STOPS.get(chat.format.name, stops)


@pytest.mark.parametrize(("name", "what"), CONVERSATIONS)
def test_an_episode_with_tools_is_the_templates_own_rendering(name: str, what: str):
    chat = chat_of(name)
    messages = SPOKEN[what][0]
    results = iter([each["content"] for each in messages if each["role"] == "tool"])

    async def answer(text: str) -> str:
        return next(results)

    cls, log = make_tool(answer, name="search")
    shown = [{"type": "function", "function": dict(cls.schema)}]
    adapted = read_messages(as_written(chat.format, messages))
    said = [
        sampled(chat.written(adapted[: index + 1], shown))
        for index, each in enumerate(adapted)
        if each["role"] == "assistant"
    ]
    engine = ScriptedEngine(tokenizer(name), said)
    ticket = make_ticket(messages=tuple(messages[:1]))
    trajectory = asyncio.run(play_with_tools(engine, chat, {"search": cls}, ticket))
    ours, theirs = trajectory.tokens.tolist(), rendered(name, messages, shown)
    assert (ours[:-1] if name == "glm4_5" else ours) == theirs[: len(ours)]
    made = [call["function"]["arguments"]["text"] for each in adapted for call in each.get("tool_calls", ())]
    assert [call.arguments["text"] for turn in trajectory.turns for call in turn.tool_calls] == log.executed == made
    assert trajectory.finish is Finish.COMPLETED
    assert_trains_what_was_sampled(trajectory, engine)
    tokens, mask = demonstration_tokens(chat, Demonstration(as_written(chat.format, messages), shown), {})
    assert np.array_equal(tokens, trajectory.tokens), "the same conversation as a demonstration"
    assert np.array_equal(mask, trajectory.loss_mask)


@pytest.mark.parametrize("name", FORMAT_OF)
def test_a_malformed_call_is_answered_counted_and_the_episode_goes_on(name: str):
    chat, made = chat_of(name), tokenizer(name)
    assert chat.format is not None
    cls, log = make_tool(name="search")
    ticket = make_ticket()

    def turn(arguments: dict[str, Any]) -> Generation:
        text = chat.format.write([WrittenCall("search", arguments)])  # type: ignore[union-attr]
        return sampled([*made.encode(text, add_special_tokens=False), chat.stop_ids[-1]])

    last = sampled([*made.encode("done", add_special_tokens=False), chat.stop_ids[0]])
    engine = ScriptedEngine(made, [turn({}), turn({"text": "é"}), last])
    toolbox = Toolbox({"search": cls}, ToolLimits(GENEROUS_S))
    trajectory = asyncio.run(play_with_tools(engine, chat, toolbox, ticket))
    assert (toolbox.counts.calls, toolbox.counts.malformed, log.executed) == (2, 1, ["é"])
    assert [call for turn in trajectory.turns for call in turn.tool_calls] == [ToolCall("search", {"text": "é"})]
    assert "argument 'text' is missing" in chat.text(trajectory.tokens)
    assert_trains_what_was_sampled(trajectory, engine)


@pytest.mark.parametrize(
    ("name", "said", "shown"),
    [
        (
            "kimi_k2",
            '<|tool_call_begin|>functions.search:5<|tool_call_argument_begin|>{"text": "a"}<|tool_call_end|>',
            "## Return of functions.search:5\n",
        ),
        (
            "kimi_k2",
            '<|tool_call_begin|>functions.search:5<|tool_call_argument_begin|>{"text": "a}<|tool_call_end|>',
            "## Return of functions.search:5\nError",
        ),
        (
            "mistral_small_3_2",
            '[TOOL_CALLS]search[CALL_ID]Ab3dEf6h9[ARGS]{"text": "a"}',
            "[TOOL_RESULTS]Ab3dEf6h9[TOOL_CONTENT]a",
        ),
        (
            "mistral_nemo",
            '[TOOL_CALLS][{"name": "search", "arguments": {"text": "a"}, "id": "Ab3dEf6h9"}]',
            '"call_id": "Ab3dEf6h9"}[/TOOL_RESULTS]',
        ),
        (
            "mistral_nemo",
            '[TOOL_CALLS][{"name": "search", "arguments": {"text": "a"}}]',
            '"call_id": "call00000"}[/TOOL_RESULTS]',
        ),
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"text": "a"}',
            '<|call|><|start|>functions.search to=assistant<|channel|>commentary<|message|>"a"<|end|>',
        ),
        (
            "llama3_1",
            '<|python_tag|>search.call(text="a")',
            '<|eom_id|><|start_header_id|>ipython<|end_header_id|>\n\n"a"<|eot_id|>',
        ),
    ],
)
def test_a_result_answers_the_call_that_the_policy_wrote(name: str, said: str, shown: str):
    """The ids, and the token that ends the turn, are the policy's own."""
    chat, made = chat_of(name), tokenizer(name)
    cls, _ = make_tool(name="search")
    end = chat.stop_ids[-1]
    ending = made.convert_ids_to_tokens(end)
    turns = [sampled([*made.encode(text, add_special_tokens=False), end]) for text in (said, "done")]
    engine = ScriptedEngine(made, turns)
    trajectory = asyncio.run(play_with_tools(engine, chat, {"search": cls}))
    text = chat.text(trajectory.tokens)
    assert said + ending in text
    assert shown in text.partition(said)[2]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3", "<think>\nb\n</think>\n\ndone"),
        ("deepseek_r1_distill", "b</think>\n\ndone"),
        ("deepseek_v3_1", "done"),
        ("glm4_5", "\n<think>b</think>\ndone"),
        ("mistral_small_3_2", "[THINK]b[/THINK]done"),
        ("kimi_k2_thinking", "<think>b</think>done"),
        ("gpt_oss", "<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>done"),
        ("llama3_1", "done"),
    ],
)
def test_the_answer_behind_a_call_is_judged_without_its_reasoning(name: str, said: str):
    chat, made = chat_of(name), tokenizer(name)
    assert chat.format is not None
    cls, log = make_tool(name="search")
    texts = (chat.format.write([WrittenCall("search", {"text": "a"})]), said)
    turns = [sampled([*made.encode(text, add_special_tokens=False), chat.stop_ids[0]]) for text in texts]
    trajectory = asyncio.run(play_with_tools(ScriptedEngine(made, turns), chat, {"search": cls}))
    assert log.executed == ["a"]
    assert answer_texts(trajectory, made)[0].strip() == "done"
