"""Every format reads the calls that it writes, and takes any text."""

from __future__ import annotations

import re
import resource
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.chat.formats.base import WrittenCall
from asyncrl.chat.formats.registry import FORMATS
from asyncrl.chat.parsing import MalformedCall, parse_turn
from asyncrl.config.option import options
from asyncrl.config.schema.actor import ActorConfig
from asyncrl.types import ToolCall

NAMES = pytest.mark.parametrize("name", FORMATS)
SCHEMAS: dict[str, dict[str, Any]] = {
    "echo": {
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "times": {"type": "integer"},
                "scale": {"type": ["number", "null"]},
                "loud": {"type": "boolean"},
                "parts": {"type": "array"},
                "more": {"type": "object"},
                "mood": {"enum": ["glad", "5"]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        }
    },
    "python": {"parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}},
}
MARKS = re.findall(
    r"\S+",
    """<tool_call> </tool_call> <function=echo> </function> <parameter=text> </parameter> <arg_key> </arg_key>
    <arg_value> </arg_value> <|python_tag|> echo.call( ; [TOOL_CALLS] [ARGS] [CALL_ID] abcdefgh1 ```json ```
    <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <|tool_call_begin|> functions.echo:0 <|end|>
    <|tool_call_argument_begin|> <|tool_call_end|> <|start|>assistant <|channel|> commentary <|message|>
    <think> </think> [ ] { } " : , echo text 5 to=functions.echo {"text":"a"} "name":"echo"
    {"name":"echo","arguments":{"text":"a"}} {"name":"echo","parameters":""",
)

PLAIN = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
WHOLE = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | WHOLE | NUMBERS | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": PLAIN,
        "times": WHOLE,
        "scale": st.none() | NUMBERS,
        "loud": st.booleans(),
        "parts": st.lists(JSON, max_size=3),
        "more": st.dictionaries(PLAIN, JSON, max_size=3),
        "mood": st.sampled_from(["glad", "5"]),
    },
)
CALLS = st.lists(ARGUMENTS, min_size=1, max_size=3)


def test_the_configuration_names_all_formats():
    [option] = [each for each in options(ActorConfig) if each.name == "tool_call_format"]
    assert option.choices == ("auto", *FORMATS)


@pytest.mark.slow
@NAMES
@settings(max_examples=15, deadline=None)
@given(made=CALLS, before=st.sampled_from(["", "I look.\n"]))
def test_what_is_written_is_read(name: str, made: list[dict[str, Any]], before: str):
    format = FORMATS[name]
    calls = [WrittenCall("echo", arguments) for arguments in made]
    before = "" if name in ("llama3", "harmony") else before
    turn = parse_turn(before + format.write(calls), SCHEMAS, format)
    assert turn.calls == turn.made == tuple(ToolCall("echo", arguments) for arguments in made)
    assert turn.content == before.strip()
    assert len(turn.ids) == len(made)


@NAMES
@settings(max_examples=15, deadline=None)
@given(text=st.lists(st.sampled_from([*MARKS, "\n", " "]) | st.text(max_size=3), max_size=30).map("".join))
def test_any_text_is_read_without_an_exception(name: str, text: str):
    turn = parse_turn(text, SCHEMAS, FORMATS[name])
    assert len(turn.ids) == len(turn.calls)
    assert all(call.error.startswith("Error: ") for call in turn.calls if isinstance(call, MalformedCall))


@NAMES
def test_a_long_text_is_read_at_once(name: str):
    format = FORMATS[name]
    call = format.write([WrittenCall("echo", {"text": "a"})])
    for text in (call[: len(call) // 2] * 2000, "x" * 200_000, "\n" * 50_000, "<" * 50_000):
        parse_turn(text, SCHEMAS, format)


A = ToolCall("echo", {"text": "a"})
LLAMA = '{"name": "echo", "parameters": {"text": "a"}}'
DEEPSEEK = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>echo\n```json\n{"text": "a"}\n```<｜tool▁call▁end｜>'
GLM = "<tool_call>echo\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>"
CODER = "<tool_call>\n<function=echo>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>"
KIMI = '<|tool_call_begin|>functions.echo:7<|tool_call_argument_begin|>{"text": "a"}<|tool_call_end|>'
CALL = "<|start|>assistant to=functions.echo<|channel|>commentary<|message|>{}"
ANALYSIS = "<|channel|>analysis<|message|>Shall I? to=functions.echo{}<|end|><|start|>assistant"

READ = {
    "llama3": [
        ('{"name": "echo", "parameters": {"text": "a"}}', [A]),
        ('{"type": "function", "name": "echo", "parameters": {"text": "a"}}', [A]),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", [A, A]),
        (f"{LLAMA}\n{LLAMA}{LLAMA}", [A, A, A]),
        (f'<|python_tag|>{LLAMA}\n{{"parameters": {{"text": "a"}}, "name": "echo"}}', [A, A]),
        (f'{LLAMA}\n{{"answer": 15}}', [A]),
        (f"{LLAMA}\n{LLAMA[:-1]}", "not valid JSON"),
        ('<|python_tag|>echo.call(text="a")', [A]),
        ("<|python_tag|>print(1)\nprint(2)", [ToolCall("python", {"code": "print(1)\nprint(2)"})]),
        ('{"answer": 15}', []),
        ("{x | x > 0}", []),
        ('The call {"name": "echo", "parameters": {"text": "a"}} would do.', []),
        ('{"name": "echo", "parameters": {"text": "a"', "not valid JSON"),
        ('<|python_tag|>{"name": "echo"}', "must be {"),
        ('<|python_tag|>echo.call(text="a"', ") must follow"),
    ],
    "mistral": [
        ('Yes.[TOOL_CALLS] [{"name": "echo", "arguments": {"text": "a"}, "id": "abcdefgh1"}]', [A]),
        ('[THINK][TOOL_CALLS][{"name": "x", "arguments": {}}][/THINK]no', []),
        ("[TOOL_CALLS][]", []),
        ('[TOOL_CALLS]{"name": "echo", "arguments": {"text": "a"}}', "a list of tool calls must follow"),
        ('[TOOL_CALLS][{"name": "echo", "arguments": {}, "id": "1"}]', "nine letters"),
        ('[TOOL_CALLS][{"name": "echo"}]', "must be {"),
    ],
    "mistral_v11": [
        ('[TOOL_CALLS]echo[CALL_ID]abcdefgh1[ARGS]{"text": "a"}[TOOL_CALLS]echo[ARGS]{"text": "a"}', [A, A]),
        ('[TOOL_CALLS]echo[CALL_ID]1[ARGS]{"text": "a"}', "nine letters"),
        ('[TOOL_CALLS]echo{"text": "a"}', "[ARGS] must follow"),
        ("[TOOL_CALLS]echo[ARGS]5", "must be a JSON object"),
    ],
    "deepseek_v3": [
        (f"<think>{DEEPSEEK}</think>Well.<｜tool▁calls▁begin｜>{DEEPSEEK}\n{DEEPSEEK}<｜tool▁calls▁end｜>", [A, A]),
        (DEEPSEEK.replace("```json", ""), "```json must follow"),
        (DEEPSEEK.replace('"a"}', '"a"'), "not valid JSON"),
        (DEEPSEEK[:-3], "<｜tool▁call▁end｜> must follow"),
        (DEEPSEEK.replace("function<｜tool▁sep｜>", "function "), "<｜tool▁sep｜> must follow"),
    ],
    "deepseek_v3_1": [
        ('<｜tool▁call▁begin｜>echo{"text": "a"}<｜tool▁call▁end｜>', "<｜tool▁sep｜> must follow"),
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>echo<｜tool▁sep｜>{"text": "a"}<｜tool▁call▁end｜>', [A]),
        (DEEPSEEK, "not valid JSON"),
        ("<｜tool▁call▁begin｜>echo", "<｜tool▁sep｜> must follow"),
    ],
    "glm": [
        (f"\n<think></think>\n{GLM}\n{GLM}", [A, A]),
        ("<tool_call>echo</tool_call>", [ToolCall("echo", {})]),
        (GLM.replace("text", "times"), "'times' must be of type integer"),
        (GLM.replace("</arg_value>", ""), "</arg_value> must follow"),
        ("<tool_call>", "name of a tool must follow"),
        (GLM.replace("</arg_value>", "<arg_key>times</arg_key><arg_value>5</arg_value>"), "</arg_value> must follow"),
        (GLM.replace("</arg_value>", "<arg_value>5</arg_value>"), "</arg_value> must follow"),
        (GLM.replace("</arg_key>", "<arg_key>times</arg_key>"), "</arg_key> must follow"),
    ],
    "qwen3_coder": [
        (f"Look:\n{CODER}", [A]),
        (CODER.replace("text", "loud").replace("\na\n", "\nTrue\n"), [ToolCall("echo", {"loud": True})]),
        (CODER.replace("text", "scale").replace("\na\n", "\nNone\n"), [ToolCall("echo", {"scale": None})]),
        (CODER.replace("\na\n", "\n\n<b>\n\n"), [ToolCall("echo", {"text": "\n<b>\n"})]),
        (CODER.replace("</function>", ""), "</function> must follow"),
        ("<tool_call>{}</tool_call>", "<function= must follow"),
        (CODER.replace("</parameter>", "<parameter=times>\n5\n</parameter>"), "</parameter> must follow"),
        (CODER.replace("=text>", "=text\n<parameter=times>"), "> must follow"),
    ],
    "kimi": [
        (f"<|tool_calls_section_begin|>{KIMI}{KIMI}<|tool_calls_section_end|>", [A, A]),
        (KIMI.replace("functions.echo:7", "echo"), "must be functions.NAME:NUMBER"),
        (KIMI.replace('"a"}', '"a"'), "not valid JSON"),
    ],
    "harmony": [
        (f'{ANALYSIS}<|channel|>commentary to=functions.echo <|constrain|>json<|message|>{{"text": "a"}}', [A]),
        (f'{ANALYSIS} to=functions.echo<|channel|>commentary json<|message|>{{"text": "a"}}', [A]),
        (' to=functions.echo<|channel|>commentary<|message|>{"text": "a"}', [A]),
        (f"{ANALYSIS}<|channel|>final<|message|>to=functions.echo", []),
        ("<|channel|>commentary to=functions.echo<|message|>a", "not valid JSON"),
        ("<|channel|>commentary to=functions.echo<|message|>{} and", "nothing may follow"),
        ("<|channel|>commentary to=browser.open<|message|>{}", "there is no tool 'browser.open'"),
    ],
}


@pytest.mark.parametrize(("name", "text", "expected"), [(name, *each) for name in READ for each in READ[name]])
def test_what_the_policy_writes_is_read(name: str, text: str, expected: list[ToolCall] | str):
    calls = parse_turn(text, SCHEMAS, FORMATS[name]).calls
    if isinstance(expected, list):
        assert list(calls) == expected
        return
    [call] = calls
    assert isinstance(call, MalformedCall)
    assert expected in call.error


def test_the_policys_own_ids_are_kept_of_malformed_calls_too():
    broken = KIMI.replace("echo:7", "echo:8").replace('"a"', '"a')
    assert parse_turn(KIMI + broken, SCHEMAS, FORMATS["kimi"]).ids == ("functions.echo:7", "functions.echo:8")
    text = '[TOOL_CALLS]echo[CALL_ID]abcdefgh1[ARGS]{"text": "a"}'
    assert parse_turn(text, SCHEMAS, FORMATS["mistral_v11"]).ids == ("abcdefgh1",)


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("harmony", f"{ANALYSIS}<|channel|>final<|message|>15", "Shall I? to=functions.echo{}", "15"),
        (
            "harmony",
            f"{ANALYSIS}<|channel|>commentary<|message|>Hm<|end|>{CALL}",
            "Shall I? to=functions.echo{}",
            "Hm",
        ),
        ("harmony", "15", "", "15"),
        ("kimi", f"<think>well</think>Yes.<|tool_calls_section_begin|>{KIMI}", "well", "Yes."),
        ("kimi", "well</think>15", "well", "15"),
        ("kimi", "<think>cut sh", "cut sh", ""),
        ("hermes", "<think>well</think>15", "", "<think>well</think>15"),
        ("deepseek_v3_1", "well</think>15", "", "well</think>15"),
    ],
)
def test_reasoning_is_apart_where_the_template_takes_it_so(name: str, text: str, reasoning: str, content: str):
    turn = parse_turn(text, SCHEMAS, FORMATS[name])
    assert (turn.reasoning, turn.content) == (reasoning, content)
    if not turn.calls and reasoning:
        assert FORMATS[name].split(FORMATS[name].join(reasoning, content)) == (reasoning, content)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("harmony", "<|channel|>commentary to=functions.echo" + "a" * 400_000),
        ("mistral_v11", "[TOOL_CALLS]echo[CALL_ID]" + " " * 400_000),
    ],
)
def test_a_call_that_never_gets_to_its_arguments_is_read_in_one_go(name: str, text: str):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert not parse_turn(text, SCHEMAS, FORMATS[name]).made
    # Minutes where each letter is tried as the name's end.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "echo", "arguments": {"scale": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "echo", "arguments": {"more": {"x": [-1e999]}}}</tool_call>'),
        ("glm", "<tool_call>echo<arg_key>scale</arg_key><arg_value>1e999</arg_value></tool_call>"),
    ],
)
def test_a_number_that_would_be_infinite_makes_no_call(name: str, text: str):
    [call] = parse_turn(text, SCHEMAS, FORMATS[name]).calls
    assert isinstance(call, MalformedCall)


@pytest.mark.parametrize(("text", "value"), [("007", "007"), ("123", "123"), ("true", "true"), ("null", None)])
def test_a_string_that_may_be_left_out_stays_as_it_is_written(text: str, value: str | None):
    turn = parse_turn(
        f"<tool_call>echo<arg_key>note</arg_key><arg_value>{text}</arg_value></tool_call>", SCHEMAS, FORMATS["glm"]
    )
    assert turn.calls == (ToolCall("echo", {"note": value}),)


THOUGHTS = [(name, ("[THINK]", "[/THINK]") if "mistral" in name else ("<think>", "</think>")) for name in FORMATS]
THINKING = pytest.mark.parametrize(("name", "tags"), [each for each in THOUGHTS if each[0] != "harmony"])


def within_text(name: str, text: str) -> str:
    """A call as it may follow other text."""
    written = FORMATS[name].write([WrittenCall("echo", {"text": text})])
    return f"<|python_tag|>{written}" if name == "llama3" else written


@THINKING
def test_a_thought_that_never_ends_makes_no_call(name: str, tags: tuple[str, str]):
    format, (opening, closing) = FORMATS[name], tags
    call = within_text(name, "a")
    for before in (f"{opening}\n", f"\n{opening}I could do ", f"{opening}a{closing}\n\n{opening}b{call}or "):
        for after in ("", " but no", call[: len(call) // 2]):
            text = before + call + after
            turn = parse_turn(text, SCHEMAS, format)
            assert turn.calls == ()
            assert "echo" in turn.reasoning + turn.content
        assert parse_turn(f"{before}{call} but no{closing}\n{call}", SCHEMAS, format).calls == (A,)


@THINKING
def test_what_only_mentions_a_thought_opens_none(name: str, tags: tuple[str, str]):
    format, (opening, closing) = FORMATS[name], tags
    call, called = within_text(name, opening), (ToolCall("echo", {"text": opening}),)
    assert parse_turn(f"A {opening} opens a thought.{call}", SCHEMAS, format).calls == called
    assert parse_turn(f"well{closing}\n{call}", SCHEMAS, format).calls == called
    assert parse_turn(f"{opening}well{closing}A {opening} too.{call}", SCHEMAS, format).calls == called
    assert parse_turn(call, SCHEMAS, format).calls == called


def test_an_argument_within_a_thought_does_not_hide_its_end():
    thought = "<think>maybe <tool_call>echo<arg_key>text</arg_key><arg_value>a, or not</think>"
    assert parse_turn(thought + GLM, SCHEMAS, FORMATS["glm"]).calls == (A,)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("deepseek_v3", DEEPSEEK.replace("<｜tool▁sep｜>", " ")),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>echo<｜tool▁call▁end｜>"),
        ("deepseek_v3_1", '<｜tool▁call▁begin｜>echo{"text": "a"}<｜tool▁call▁end｜>'),
        ("kimi", '<|tool_call_begin|>functions.echo:6{"text": "a"}<|tool_call_end|>'),
        ("kimi", "<|tool_call_begin|>functions.echo:6"),
        ("glm", "<tool_call>echo<arg_key>text</arg_key><arg_value>a</tool_call>"),
        ("glm", "<tool_call>echo<arg_key>text</tool_call>"),
        ("qwen3_coder", "<tool_call><function=echo><parameter=text>a</function></tool_call>"),
    ],
)
def test_a_broken_call_does_not_swallow_the_next_one(name: str, broken: str):
    whole = FORMATS[name].write([WrittenCall("echo", {"text": "a"})])
    [error, made] = parse_turn(broken + whole, SCHEMAS, FORMATS[name]).calls
    assert isinstance(error, MalformedCall)
    assert made == A


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"{LLAMA}\n\nThat should do.", "That should do."),
        (f"{LLAMA}\n{{15}}", "{15}"),
        (f"First <|python_tag|>{LLAMA} then <|python_tag|>{LLAMA} done.", "First  then  done."),
        (f"well</think>First <|python_tag|>{LLAMA} then", "well</think>First  then"),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", ""),
    ],
)
def test_text_beside_the_calls_of_llama_is_content(text: str, content: str):
    turn = parse_turn(text, SCHEMAS, FORMATS["llama3"])
    assert turn.made
    assert turn.content == content


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"allOf": [{"type": "string"}]}, "5"),
        ({"allOf": [{"minLength": 1}, {"anyOf": [{"type": "string"}, {"type": "null"}]}]}, "5"),
        ({"allOf": [{"type": "integer"}, {"minimum": 0}]}, 5),
        ({"type": ["string", "integer"], "allOf": [{"type": "integer"}]}, 5),
        ({"type": ["string", "integer"], "allOf": [{"minimum": 0}, True]}, "5"),
        ({"allOf": None}, 5),
    ],
)
def test_a_schema_of_several_parts_says_which_values_are_strings(schema: dict[str, Any], value: str | int):
    schemas = {"echo": {"parameters": {"properties": {"text": schema}}}}
    turn = parse_turn(GLM.replace(">a<", ">5<"), schemas, FORMATS["glm"])
    assert turn.calls == (ToolCall("echo", {"text": value}),)
