"""The schema of a tool decides how formats that write arguments as text are read, however the schema says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from asyncrl.chat.formats.registry import FORMATS
from asyncrl.chat.parsing import MalformedCall, parse_turn

DEFINITIONS: Mapping[str, Any] = {
    "Mode": {"type": "string", "enum": ["1", "2"]},
    "Id": {"type": "string"},
    "Point": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "Alias": {"$ref": "#/$defs/Id"},
    "Self": {"$ref": "#/$defs/Self"},
    "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "string"}]},
    "a/b~c": {"type": "string"},
    "Level": {"enum": [1, 2]},
}
STRING, INTEGER, NULL, OBJECT = ({"type": kind} for kind in ("string", "integer", "null", "object"))


def ref(name: str, within: str = "$defs") -> dict[str, Any]:
    return {"$ref": f"#/{within}/{name}"}


def any_of(*choices: Any) -> dict[str, Any]:
    return {"anyOf": list(choices)}


def function(schema: Any, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": DEFINITIONS, "definitions": DEFINITIONS}
    return {"name": "f", "parameters": {**parameters, **more}}


def read(schema: Any, text: str, format: str, **more: Any) -> Any:
    """The argument, or the error."""
    turn = {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }[format]
    [call] = parse_turn(turn, {"f": function(schema, **more)}, FORMATS[format]).calls
    return call.error if isinstance(call, MalformedCall) else call.arguments["x"]


READ: list[tuple[Any, str, Any]] = [
    # A string is the text, even if it looks like another value.
    (STRING, "007", "007"),
    (STRING, "null", "null"),
    (STRING, "True", "True"),
    (STRING, "", ""),
    (STRING, "\n  indented\n", "\n  indented\n"),
    (STRING, "<a href='x'>&amp;</a>", "<a href='x'>&amp;</a>"),
    ({"type": ["string", "integer"]}, "12", "12"),
    (any_of(STRING, OBJECT), '{"a": 1}', '{"a": 1}'),
    ({"format": "date"}, "2024", "2024"),
    ({"pattern": "^0"}, "007", "007"),
    ({**any_of(STRING, NULL), "maxLength": 9}, "None", None),
    ({"format": "int64"}, "12", 12),
    # References, also to references, within choices, and in both places.
    (ref("Id"), "007", "007"),
    (ref("Id", "definitions"), "007", "007"),
    (ref("Alias"), "007", "007"),
    (ref("a~1b~0c"), "007", "007"),
    ({"allOf": [ref("Id")]}, "007", "007"),
    ({**ref("Id"), "description": "an id"}, "007", "007"),
    (any_of(ref("Id"), NULL), "12", "12"),
    (any_of(ref("Mode"), INTEGER), "1", "1"),
    (any_of(ref("Mode"), INTEGER), "3", 3),
    (ref("Mode"), "1", "1"),
    (ref("Point"), '{"a": 1}', {"a": 1}),
    (any_of(ref("Point"), NULL), "null", None),
    (ref("Level"), "2", 2),
    # Listed values are what they are.
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["auto", 5]}, "5", 5),
    ({"enum": ["auto", 5]}, "auto", "auto"),
    ({"enum": ["true", "false"]}, "true", "true"),
    ({"enum": [True, "auto"]}, "True", True),
    ({"const": "1"}, "1", "1"),
    ({"const": 1}, "1", 1),
    ({"const": None}, "None", None),
    ({"oneOf": [{"const": "1"}, {"const": "2"}]}, "2", "2"),
    (any_of({"const": "auto"}, INTEGER), "5", 5),
    (any_of({"const": "auto"}, INTEGER), "auto", "auto"),
    # Nulls, as templates write them; of strings no other spelling.
    (any_of(STRING, NULL), "None", None),
    (any_of(STRING, NULL), "null", None),
    (any_of(STRING, NULL), "none", "none"),
    (any_of(STRING, NULL), "NULL", "NULL"),
    (any_of({"enum": ["None", "all"]}, NULL), "None", "None"),
    (any_of({"enum": ["None", "all"]}, NULL), "null", None),
    ({"type": "string", "nullable": True}, "None", None),
    ({"type": "string", "nullable": False}, "None", "None"),
    ({"type": "integer", "nullable": True}, "none", None),
    ({"enum": ["a", None]}, "None", None),
    (any_of(INTEGER, NULL), "null", None),
    (any_of(INTEGER, NULL), "5", 5),
    ({"type": ["integer", "null"]}, "5", 5),
    (any_of(OBJECT, NULL), "null", None),
    # All that must hold together.
    ({"allOf": [{"type": ["string", "integer"]}, INTEGER]}, "12", 12),
    ({"type": "string", "anyOf": [{"format": "date"}, {"format": "time"}]}, "2024", "2024"),
    ({"type": "number", "anyOf": [INTEGER, STRING]}, "12", 12),
    # No type, an unknown one, one that says nothing, and what refers to itself.
    ({}, "12", 12),
    (True, "12", 12),
    ({}, "twelve", "twelve"),
    ({"type": "any"}, "12", 12),
    (ref("Missing"), "12", 12),
    (ref("Self"), "12", 12),
    (ref("Tree"), "12", "12"),
    ({"$ref": "https://elsewhere/schema"}, "12", 12),
    ({"$ref": 5, "anyOf": 5, "allOf": {}, "enum": 5, "type": 5}, "12", 12),
    ({"allOf": [{"type": [["string"]]}]}, "12", 12),
    ({"type": "boolean"}, "True", True),
    ({"type": "array"}, '["a", 1]', ["a", 1]),
]
"""Schema, text and the argument."""

REFUSED: list[tuple[Any, str, str]] = [
    (INTEGER, "2026-01-15", "must be of type integer"),
    (INTEGER, "", "must be of type integer"),
    ({"type": "boolean"}, "yes", "must be of type boolean"),
    (any_of(INTEGER, NULL), "five", "must be of type integer or null"),
    (ref("Point"), "5", "must be of type object"),
    (ref("Mode"), "3", 'must be one of ["1", "2"]'),
    ({"enum": [1, 2]}, "3", "must be one of [1, 2]"),
    ({"enum": [1, 2]}, "x", "must be of type integer"),
    ({"enum": [1]}, "True", "must be of type integer"),
    ({"const": "1"}, "2", 'must be one of ["1"]'),
    (any_of({"const": "a"}, {"const": "b"}), "c", 'must be one of ["a", "b"]'),
    (any_of(INTEGER, {"const": "half"}), "third", 'must be of type integer, or one of ["half"]'),
    (False, "1", "must be left out"),
]
"""Schema, text and what the policy reads."""


@pytest.mark.parametrize("format", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(("schema", "text", "expected"), READ)
def test_an_argument_is_what_its_schema_takes(schema: Any, text: str, expected: Any, format: str) -> None:
    found = read(schema, text, format)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("format", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(("schema", "text", "error"), REFUSED)
def test_an_argument_that_its_schema_does_not_take_is_an_error_that_the_policy_reads(
    schema: Any, text: str, error: str, format: str
) -> None:
    assert read(schema, text, format) == f"Error: argument 'x' {error}."


def test_the_check_of_formats_that_write_json_follows_the_schema_too() -> None:
    def given(value: str, schema: Any) -> Any:
        turn = f'<tool_call>\n{{"name": "f", "arguments": {{"x": {value}}}}}\n</tool_call>'
        [call] = parse_turn(turn, {"f": function(schema)}, FORMATS["hermes"]).calls
        return call.error if isinstance(call, MalformedCall) else call.arguments["x"]

    assert given('"five"', any_of(INTEGER, NULL)) == "Error: argument 'x' must be of type integer or null."
    assert given('"3"', ref("Mode")) == 'Error: argument \'x\' must be one of ["1", "2"].'
    assert given("null", {"type": "string", "nullable": True}) is None
    assert given("1", any_of(ref("Mode"), INTEGER)) == 1


@pytest.mark.parametrize("format", ["qwen3_coder", "glm"])
def test_the_arguments_may_be_behind_a_reference_themselves(format: str) -> None:
    arguments = {"type": "object", "properties": {"x": ref("Id")}, "required": ["x"]}
    more = {"properties": None, "$ref": "#/$defs/Arguments", "$defs": {**DEFINITIONS, "Arguments": arguments}}
    assert read(None, "007", format, **more) == "007"


def test_many_references_take_no_time_and_no_stack() -> None:
    doubled = {f"D{n}": any_of(ref(f"D{n + 1}"), ref(f"D{n + 1}")) for n in range(200)}
    chained = {f"C{n}": ref(f"C{n + 1}") for n in range(5000)}
    for name, definitions in (("D0", doubled), ("C0", chained)):
        assert read(ref(name), "12", "glm", **{"$defs": definitions}) == 12
