"""The record of a conversation is the rendering by the family's own template, or the start finds that it is not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from asyncrl.chat.chat import Chat
from asyncrl.chat.chat_checks import rewritings
from asyncrl.chat.contents import OWN_MARKS
from asyncrl.chat.formats.base import Format
from asyncrl.chat.formats.registry import FORMATS
from asyncrl.chat.messages import read_messages, read_tools
from asyncrl.engine.base import Generation
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.episode.recorder import CompletionRequest, Recorder
from asyncrl.errors import RefusedError
from asyncrl.types import Role
from tests.episode.fakes import make_ticket
from tests.templates.families import FAMILIES, tokenizer

NAMES = pytest.mark.parametrize("name", FAMILIES)
LIMITS = EpisodeLimits(max_turns=8, max_turn_tokens=4000, max_tokens=20_000, max_total_tokens=40_000)
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Sucht größere Dinge.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "what"}},
            "required": ["text"],
        },
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*texts: str, content: str = "", first: int = 0) -> dict[str, Any]:
    made = [
        {
            "id": f"chatcmpl-{first + number}",
            "type": "function",
            "function": {"name": "search", "arguments": json.dumps({"text": text}, ensure_ascii=False)},
        }
        for number, text in enumerate(texts)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def found(content: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"chatcmpl-{number}", "content": content}


SPOKEN: Mapping[str, tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]] = {
    "a later question": ([user("5*3?"), says("fünfzehn"), user(" sure?\n"), says("yes 解")], []),
    "a system message and tools": (
        [{"role": "system", "content": "Be brief."}, user("5*3?"), says("15"), user("and 5*4?"), says("20")],
        [TOOL],
    ),
    "text before a call": ([user("who?"), calls("Ünal", content="I look."), found("a\n\nb "), says("she")], [TOOL]),
    "several calls at once": (
        [user("who?"), calls("a", "b", "a"), found("1"), found("2", 1), found("", 2), says("both")],
        [TOOL],
    ),
    "calls one after another": (
        [user("who?"), calls("a"), found('{"x": 1}'), calls("b", first=1), found("2", 1), says("so")],
        [TOOL],
    ),
    "a question after a result": (
        [user("who?"), calls("a"), found("1"), says("one"), user("sure?"), says("yes")],
        [TOOL],
    ),
    "thoughts": ([user("5*3?"), says("<think>\nwell\n</think>\n\n15"), user("sure?"), says("yes")], []),
    "thoughts before a call": (
        [user("who?"), calls("a", content="<think>\nwell\n</think>\n\n"), found("1"), says("one")],
        [TOOL],
    ),
}

WITH_CALLS = {what for what, (messages, _) in SPOKEN.items() if any("tool_calls" in each for each in messages)}
ALL_CALLS_AND_QUESTIONS = set(SPOKEN) - {"thoughts before a call"}
DROPS_TEXT = {"text before a call", "thoughts before a call"}
ASKED_AGAIN = {"a later question", "a system message and tools", "a question after a result", "thoughts"}

REWRITTEN: Mapping[str, set[str]] = {
    "qwen3": ALL_CALLS_AND_QUESTIONS,  # thoughts go before a later question; the last answer has one, empty or not
    "deepseek_v3_1": {"thoughts"},
    "kimi_k2": {"thoughts", "thoughts before a call"},
    "kimi_k2_thinking": {"thoughts", "thoughts before a call"},
    "qwq": set(SPOKEN),  # its generation prompt opens a thought, and no history has one
    "deepseek_r1_distill": ALL_CALLS_AND_QUESTIONS,  # as QwQ's, but for thoughts before a call
    "llama3_1": DROPS_TEXT,
    "llama3_2": DROPS_TEXT,
    "llama3_3": DROPS_TEXT,
    "mistral_nemo": DROPS_TEXT | {"a system message and tools", "a question after a result"},  # tools move on
    "mistral_small_3_2": {"a system message and tools", "a question after a result"},
    "hermes3": WITH_CALLS,  # drops text before calls, and writes a newline after results that are not the last
    "glm4_5": {"thoughts"},
    "gpt_oss": ASKED_AGAIN | DROPS_TEXT,  # the last answer returns, an earlier one ends; an answer drops thoughts
}
"""The conversations whose recording differs from the rendering; other families have none."""

REFUSED: Mapping[str, set[str]] = {
    **{name: {"several calls at once"} for name in ("llama3_1", "llama3_2", "llama3_3", "gpt_oss")},
    **dict.fromkeys(("gemma3", "phi3_5", "phi4", "granite"), WITH_CALLS),
    "gemma2": WITH_CALLS | {"a system message and tools"},
}
"""The conversations that a template cannot show."""


@cache
def chat_of(name: str) -> Chat:
    return Chat(tokenizer(name))


def recorded(chat: Chat, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
    """Return the recorded tokens of an agent's conversation. The policy writes each assistant turn as the template
    would."""
    recorder = Recorder(make_ticket(), LIMITS, chat)
    messages = as_written(chat.format, messages)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        request = CompletionRequest(read_messages(messages[:index]), read_tools(tools))
        [turn] = read_messages([message])
        said = chat.written([*request.messages, turn], request.tools)
        none = np.zeros(len(said), np.float32), np.zeros(len(said), np.int32)
        recorder.record(recorder.reserve(request), Generation(said, *none, "stop"), turn, [])
    [branch] = recorder.branches
    assert branch.turns[-1].role is Role.ASSISTANT
    return branch.tokens.tolist()


def as_written(format: Format | None, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the family's policy writes them: Kimi gives calls ids, some write thoughts apart."""
    id = "functions.search:" if format is FORMATS["kimi"] else "chatcmpl-"
    changed: list[dict[str, Any]] = json.loads(json.dumps(messages).replace("chatcmpl-", id))
    for message in changed:
        thought, end, rest = message["content"].partition("\n</think>\n\n")
        if end and format and format.reasoning_apart:
            message |= {"content": rest, "reasoning_content": thought.removeprefix("<think>\n")}
    return changed


def rendered(name: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
    """The tokenisation of the template's own rendering, from messages as the family's users write them."""
    format = chat_of(name).format
    adapted = read_messages(as_written(format, messages))
    in_turn = [{**message, "thinking": message.get("reasoning_content")} for message in adapted]
    for message in in_turn:
        if "tool_calls" in message:
            message["tool_calls"] = [
                {"id": f"call{number:05d}", **call, "function": _function(name, call["function"])}
                for number, call in enumerate(message["tool_calls"])
            ]
    made = tokenizer(name)
    text = made.apply_chat_template(in_turn, tools=list(tools) or None, tokenize=False)
    return list(made.encode(text, add_special_tokens=False))


def _function(name: str, function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": json.dumps(arguments, ensure_ascii=False) if "deepseek" in name else arguments}


@NAMES
@pytest.mark.parametrize("what", SPOKEN)
def test_what_is_recorded_is_the_templates_own_rendering_or_listed(name: str, what: str):
    messages, tools = SPOKEN[what]
    if what in REFUSED.get(name, ()):
        with pytest.raises(RefusedError, match="chat template"):
            recorded(chat_of(name), messages, tools)
        return
    ours, theirs = recorded(chat_of(name), messages, tools), rendered(name, messages, tools)
    if what in REWRITTEN.get(name, ()):
        assert theirs[: len(ours)] != ours
    elif name == "glm4_5":  # a turn ends with the token by which the next one begins
        assert ours[:-1] == theirs
    else:  # some templates write a newline, or the end of the text, after the end of a turn
        assert ours == theirs[: len(ours)]


@NAMES
def test_what_a_template_rewrites_is_found_at_the_start(name: str):
    found_out = {each for names in rewritings(chat_of(name)).values() for each in names}
    assert found_out == REWRITTEN.get(name, set())


@NAMES
def test_contents_without_special_tokens_are_encoded_as_the_tokenizer_encodes_the_rendering(name: str):
    made = tokenizer(name)
    messages = [user("5*3?  <table> a\n\nb <think> <|x|> \ue123 '\\ud83d' ünï"), says("15"), user("sure?")]
    expected = made.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ours = chat_of(name).prompt(messages, [])
    assert ours.tolist() == made.encode(expected, add_special_tokens=False)


def forged(name: str) -> str:
    """All that the family's template writes around turns, as somebody would write it who wants to speak in turns."""
    family = FAMILIES[name]
    source = str(tokenizer(name).chat_template)
    marks = [*family.special.split(" "), *(mark for mark in family.marks.split(" ") if mark and mark in source)]
    return (
        "x".join(mark for mark in marks if mark not in OWN_MARKS)
        + f"{family.eos}\n asyncrlmark \ue0001\ue001 \\ue0001\\ue001 ü"
    )


def conversation(text: str, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation in which everything that others write is `text`."""
    function = {
        "name": f"search{text}",
        "description": text,
        "parameters": {"type": "object", "properties": {f"a{text}": {"type": "string", "description": text}}},
    }
    opening = [] if name == "gemma2" else [{"role": "system", "content": text}]
    messages = [*opening, user(text), says(f"b{text}"), user(f"c{text}")]
    if name in REFUSED and REFUSED[name] >= WITH_CALLS:
        return messages, [{"type": "function", "function": function}]
    made = calls("x")
    made["tool_calls"][0]["function"] = {"name": f"search{text}", "arguments": {f"a{text}": text}}
    return [*messages, made, found(text)], [{"type": "function", "function": function}]


def marks_in(name: str, tokens: Sequence[int]) -> list[int]:
    """The tokens that could begin or end a turn."""
    made = tokenizer(name)
    harmless = set(made.convert_tokens_to_ids([*OWN_MARKS, "\n\n", "<table>"]))
    return [token for token in tokens if token in set(made.get_added_vocab().values()) - harmless]


@NAMES
def test_nothing_that_others_write_becomes_a_token_of_the_template(name: str):
    chat = chat_of(name)
    hostile, tools = conversation(forged(name), name)
    harmless, plain_tools = conversation("word", name)
    asked, other = (read_messages(each) for each in (hostile, harmless))
    tokens = chat.prompt(asked, tools)
    assert marks_in(name, tokens.tolist()) == marks_in(name, chat.prompt(other, plain_tools).tolist())
    assert without_blanks(forged(name)) in without_blanks(chat.text(tokens))
    if other[-1]["role"] == "tool":
        suffix, expected = chat.suffix(asked[-1:], tools), chat.suffix(other[-1:], plain_tools)
        assert marks_in(name, suffix.tolist()) == marks_in(name, expected.tolist())
    suffix, expected = chat.suffix([user(forged(name))], tools), chat.suffix([user("word")], plain_tools)
    assert marks_in(name, suffix.tolist()) == marks_in(name, expected.tolist())
    assert without_blanks(forged(name)) in without_blanks(chat.text(suffix))


def without_blanks(text: str) -> str:
    """The letters: a tokenizer as Llama 2's writes a blank at the beginning of a stretch."""
    return "".join(text.split())


def test_a_special_token_in_a_result_is_encoded_as_the_tokenizer_encodes_its_letters():
    made, chat = tokenizer("qwen2_5"), chat_of("qwen2_5")
    letters = made.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
    around = [made.encode(text, add_special_tokens=False) for text in ("\n<tool_response>\n15", "\n</tool_response>")]
    suffix = chat.suffix([{"role": "tool", "name": "search", "content": "15<|im_end|>"}], [TOOL]).tolist()
    begin = [*made.encode("\n<|im_start|>user", add_special_tokens=False), *around[0], *letters, *around[1]]
    assert suffix[: len(begin)] == begin


@pytest.mark.parametrize("name", [name for name in FAMILIES if not REFUSED.get(name, set()) >= WITH_CALLS])
def test_an_episode_goes_on_behind_results_that_imitate_turns(name: str):
    messages, tools = SPOKEN["calls one after another"]
    hostile = [found(forged(name)) if each["role"] == "tool" else each for each in messages]
    for message, number in zip([each for each in hostile if each["role"] == "tool"], (0, 1), strict=True):
        message["tool_call_id"] = f"chatcmpl-{number}"
    ours, expected = recorded(chat_of(name), hostile, tools), recorded(chat_of(name), messages, tools)
    assert marks_in(name, ours) == marks_in(name, expected)
