"""Tool calls in the hermes form, and what is checked of calls in every form."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.chat.formats.base import Functions
from asyncrl.chat.formats.registry import FORMATS
from asyncrl.chat.parsing import MalformedCall, parse_turn
from asyncrl.types import ToolCall

SCHEMAS: dict[str, dict[str, Any]] = {
    "echo": {
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "times": {"type": "integer"},
                "mood": {"enum": ["glad", "sad"]},
                "scale": {"type": ["number", "null"]},
            },
            "required": ["text"],
        }
    },
    "free": {"parameters": {"type": "object", "additionalProperties": True}},
    "bare": {},
}


def parse_tool_calls(text: str, schemas: Functions) -> tuple[ToolCall | MalformedCall, ...]:
    return parse_turn(text, schemas, FORMATS["hermes"]).calls


def wrapped(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def made(arguments: Any, name: str = "echo") -> str:
    return wrapped(json.dumps({"name": name, "arguments": arguments}))


def errors(text: str) -> list[str]:
    return [call.error for call in parse_tool_calls(text, SCHEMAS) if isinstance(call, MalformedCall)]


A, B = ToolCall("echo", {"text": "a"}), ToolCall("echo", {"text": "é", "times": 2})
CODE = 'print("</tool_call><tool_call></think>")'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 15.", []),
        (
            f"First\n{made(A.arguments)}then {made({}, 'bare')}{wrapped('oops')}{made(B.arguments)}",
            [A, ToolCall("bare", {}), "malformed", B],
        ),
        (made({"text": CODE}), [ToolCall("echo", {"text": CODE})]),
        (f"<think>\nmaybe {made(B.arguments)}or <tool_call></think>\n{made(A.arguments)}", [A]),
        ('<tool_call>{"name": ' + made(A.arguments), ["malformed", A]),
    ],
    ids=["none", "several", "marks within a string", "thoughts", "after an unclosed one"],
)
def test_the_calls_of_a_turn_are_read_in_order(text: str, calls: list[ToolCall | str]):
    found = parse_tool_calls(text, SCHEMAS)
    assert ["malformed" if isinstance(call, MalformedCall) else call for call in found] == calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (wrapped('{"name": "echo", "arguments": {"text": "a"}'), "not valid JSON"),
        (wrapped(""), "not valid JSON"),
        ("<tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "bare", "arguments": {}}', "</tool_call> must follow"),
        (wrapped('{"name": "bare", "arguments": {}} {}'), "</tool_call> must follow"),
        (wrapped('["bare"]'), "must be {"),
        (wrapped('{"name": "bare"}'), "must be {"),
        (wrapped('{"name": "bare", "arguments": "{}"}'), "must be {"),
        (wrapped('{"name": "bare", "arguments": {}, "id": 1}'), "must be {"),
        (made({}, "other"), "there is no tool 'other'; there are: echo, free, bare"),
        (made({}), "argument 'text' is missing"),
        (made({"text": 5}), "'text' must be of type string"),
        (made({"text": "a", "times": True}), "'times' must be of type integer"),
        (made({"text": "a", "times": 1.5}), "'times' must be of type integer"),
        (made({"text": "a", "scale": "x"}), "'scale' must be of type number or null"),
        (made({"text": "a", "mood": "odd"}), "'mood' must be one of"),
        (made({"text": "a", "texts": "b"}), "there is no argument 'texts'; there are: text, times"),
        (made({"any": 1}, "bare"), "there are: none"),
        (made({"x": 2**64}, "free"), "more than 64 bits"),
        (wrapped('{"name": "free", "arguments": {"x": ' + "9" * 5000 + "}}"), "not valid JSON"),
        (wrapped('{"name": "free", "arguments": {"x": NaN}}'), "NaN is not JSON"),
        (made({"x": "\ud800"}, "free"), "half of a surrogate pair"),
        (made({"\ud800": 1}, "free"), "half of a surrogate pair"),
        (wrapped('{"name": "free", "arguments": {"x": ' + "[" * 40 + "]" * 40 + "}}"), "nested too deeply"),
        (wrapped("[" * 100_000), "not valid JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(text: str, error: str):
    (found,) = errors(text)
    assert found.startswith("Error: ")
    assert error in found
    assert len(found) < 250


@pytest.mark.parametrize("key", ["allOf", "anyOf", "oneOf"])
def test_arguments_in_parts_of_the_schema_are_left_to_the_tool(key: str) -> None:
    parts = [{"properties": {"y": {"type": "integer"}}}, {"$ref": "#/$defs/Z"}, {"required": ["x"]}, {"properties": 5}]
    z = {"properties": {"z": {}}, "anyOf": [{"$ref": "#/$defs/Z"}]}
    schema = {"properties": {"x": {"type": "integer"}}, "required": ["x"], key: parts, "$defs": {"Z": z}}
    functions = {"f": {"parameters": schema}, "closed": {"parameters": {**schema, "additionalProperties": False}}}
    arguments = {"x": 1, "y": 2, "z": 3}
    assert parse_tool_calls(made(arguments, "f"), functions) == (ToolCall("f", arguments),)
    for wrong, name in (({"y": 2}, "f"), ({"x": "one"}, "f"), ({"x": 1, "w": 1}, "f"), (arguments, "closed")):
        [call] = parse_tool_calls(made(wrong, name), functions)
        assert isinstance(call, MalformedCall)


@given(
    st.text()
    | st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", "\n", "a"])).map(
        "".join
    )
)
def test_any_text_is_taken_without_an_exception(text: str):
    assert len(parse_tool_calls(text, SCHEMAS)) == len(errors(text))


KEYS = st.text(st.characters(), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | KEYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.dictionaries(KEYS, VALUES, max_size=3))
def test_whatever_is_taken_as_a_call_can_be_sent(arguments: dict[str, Any]):
    for found in parse_tool_calls(made(arguments, "free"), SCHEMAS):
        if isinstance(found, ToolCall):
            assert msgpack.unpackb(msgpack.packb(found.arguments)) == found.arguments == arguments
