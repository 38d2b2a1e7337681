"""Earlier calls in prompts, in each form that a row may have: every source is rendered as the same conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.chat.chat import Chat
from asyncrl.chat.messages import read_messages
from asyncrl.data.demonstrations import DemonstrationFile
from asyncrl.data.reading import TaskFile
from asyncrl.episode.demonstrations import demonstration_tokens
from asyncrl.errors import RefusedError
from tests.episode.fakes import make_tokenizer
from tests.templates.families import FAMILIES, tokenizer

Message = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
ID = "functions.look:0"
MISSING = object()


def conversation(content: Any = "", arguments: Any = '{"a": 1}', calls: Any = MISSING) -> list[Message]:
    """A conversation with a call in a message with `content`; `calls` are the tool_calls of the answer."""
    call = {"id": ID, "type": "function", "function": {"name": "look", "arguments": arguments}}
    turn: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
    answer: Message = {"role": "assistant", "content": "ok", "tool_calls": calls}
    messages = [
        {"role": "user", "content": "q"},
        turn,
        {"role": "tool", "content": "r", "tool_call_id": ID},
        answer,
        {"role": "user", "content": "and?"},
    ]
    return [{name: value for name, value in each.items() if value is not MISSING} for each in messages]


FORMS = {
    "content null": conversation(content=None),
    "no content": conversation(content=MISSING),
    "content empty": conversation(),
    "arguments as an object": conversation(arguments={"a": 1}),
    "arguments as an object, and content null": conversation(None, {"a": 1}),
    "tool_calls null": conversation(None, calls=None),
    "tool_calls empty": conversation(None, calls=[]),
}


def parquet(folder: Path, column: str, messages: list[Message]) -> Path:
    row = {column: messages, "data_source": "s", "reward_model": {"ground_truth": "1"}}
    pq.write_table(pa.Table.from_pylist([row]), folder / "rows.parquet")
    return folder / "rows.parquet"


def json_lines(folder: Path, column: str, messages: list[Message]) -> Path:
    row = {column: messages, "data_source": "s", "reward_model": {"ground_truth": "1"}}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return folder / "rows.jsonl"


WRITERS = {"parquet": parquet, "json_lines": json_lines}
Writer = Callable[[Path, str, list[Message]], Path]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_rendered_as_at_the_endpoint_whatever_its_form(name: str, form: str, tmp_path: Path) -> None:
    chat = Chat(tokenizer(name))
    try:
        expected = chat.text(chat.prompt(read_messages(FORMS["content empty"]), [TOOL]))
    except RefusedError:
        expected = ""
    for messages in (
        *(TaskFile(write(tmp_path, "prompt", FORMS[form]))[0].messages for write in WRITERS.values()),
        FORMS[form],
        read_messages(FORMS[form]),
    ):
        try:
            found = chat.text(chat.prompt(messages, [TOOL]))
        except RefusedError:
            found = ""
        assert found == expected


def learned(chat: Chat, file: Path) -> list[Any]:
    """Tokens and mask of the demonstration in a file, or what its refusal says."""
    try:
        tokens, mask = demonstration_tokens(chat, DemonstrationFile([file])[0], {"look": TOOL["function"]})
    except RefusedError as error:
        return [str(error)]
    return [tokens.tolist(), mask.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_demonstration_is_the_same_in_each_form(name: str, tmp_path: Path) -> None:
    chat = Chat(tokenizer(name))

    def shown(form: str, write: Writer) -> list[Any]:
        return learned(chat, write(tmp_path, "messages", FORMS[form][:-1]))

    expected = shown("content empty", parquet)
    for form in FORMS:
        for write in WRITERS.values():
            assert shown(form, write) == expected, form


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_code_of_users_finds_a_content_in_each_message(write: Writer, tmp_path: Path) -> None:
    for form in ("content null", "no content"):
        task = TaskFile(write(tmp_path, "prompt", FORMS[form]))[0]
        assert [each["content"] for each in task.messages] == ["q", None, "r", "ok", "and?"]


def chat_with(turn_with_calls: str) -> Chat:
    """A ChatML template that renders a turn with calls so."""
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.tool_calls %}"
        + turn_with_calls
        + "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
        + "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return Chat(make_tokenizer(template))


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{% if message.content is string %}<text>{{ message.content }}{% else %}<only>{% endif %}", "<only>"),
        ("<text>{{ message.content }}", "<text>"),
        ("<text>{{ message.content | trim }}", "<text>"),
        ("<text>{{ message.content + '.' }}", "<text>."),
        ("{% if message.content is string %}{{ raise_exception('calls alone') }}{% endif %}<only>", "<only>"),
        ("{{ message.content or 'nothing' }}", "nothing"),
    ],
)
def test_a_turn_of_calls_alone_has_null_as_its_content_where_the_template_takes_null(
    template: str, written: str, tmp_path: Path
) -> None:
    chat = chat_with(template)
    for form in FORMS:
        messages = TaskFile(parquet(tmp_path, "prompt", FORMS[form]))[0].messages
        for each in (messages, read_messages(FORMS[form]), FORMS[form]):
            text = chat.text(chat.prompt(each, [TOOL]))
            assert f"<|im_start|>assistant\n{written}<tool_call>" in text, form
            assert "None" not in text


def test_a_result_has_the_name_and_the_id_of_its_call_also_with_ids_of_programs() -> None:
    chat = Chat(tokenizer("mistral_small_3_2"))
    plain = conversation()
    for id in ("call_0123456789abcdef", ""):
        changed = json.loads(json.dumps(plain).replace(ID, id))
        assert chat.text(chat.prompt(changed, [TOOL])) == chat.text(chat.prompt(read_messages(changed), [TOOL]))
    kimi = Chat(tokenizer("kimi_k2"))
    for id in ("call_0123456789abcdef", ID):
        changed = json.loads(json.dumps(plain).replace(ID, id))
        assert "## Return of functions.look:0\nr" in kimi.text(kimi.prompt(changed, [TOOL]))


def test_a_result_with_an_id_leaves_the_other_calls_to_results_without_one() -> None:
    calls = [{"id": id, "function": {"name": name, "arguments": "{}"}} for id, name in (("c1", "a"), ("c2", "b"))]
    results = [{"role": "tool", "tool_call_id": "c2", "content": "x"}, {"role": "tool", "content": "y"}]
    later = [{"role": "assistant", "content": "z"}, {"role": "tool", "content": "w"}]
    read = read_messages(
        [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}, *results, *later]
    )
    assert [each["name"] for each in read if each["role"] == "tool"] == ["b", "a", "unknown"]


def test_a_template_of_its_own_for_conversations_without_tools_may_take_no_null() -> None:
    chat = Chat(tokenizer("hermes3"))
    for form in FORMS.values():
        assert "and?" in chat.text(chat.prompt(form, ()))
        assert '"name": "look"' in chat.text(chat.prompt(form, [TOOL]))


def in_parallel(ids: Sequence[Any], results: Sequence[Any]) -> list[Message]:
    """A turn with two calls of different tools, which have these `ids`, and their results with the ids `results`."""
    functions = [{"name": name, "arguments": '{"a": 1}'} for name in ("look", "find")]
    calls = [{"id": id, "type": "function", "function": each} for id, each in zip(ids, functions, strict=True)]
    answers = zip(("looked", "found"), results, strict=True)
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "content": text, "tool_call_id": id} for text, id in answers),
    ]


@pytest.mark.parametrize("ids", [(None, None), ("", ""), (0, 1), ("x", "y")])
@pytest.mark.parametrize("name", ["mistral_small_3_2", "kimi_k2"])
def test_each_result_answers_its_own_call_also_without_ids(name: str, ids: Sequence[Any]) -> None:
    chat, tools = Chat(tokenizer(name)), [TOOL, {**TOOL, "function": {**TOOL["function"], "name": "find"}}]
    expected = chat.text(chat.prompt(read_messages(in_parallel(("a", "b"), ("a", "b"))), tools))
    for results in (ids, (None, None)):
        assert chat.text(chat.prompt(read_messages(in_parallel(ids, results)), tools)) == expected
