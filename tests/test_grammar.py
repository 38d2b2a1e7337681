"""The forms in which grammars are given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.errors import RefusedError
from asyncrl.grammar import read_grammar
from asyncrl.types import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, None),
        ({}, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_schema", '{"type": "object"}')),
        (
            {"type": "json_schema", "json_schema": {"name": "pick", "strict": True, "schema": SCHEMA}},
            Grammar("json_schema", json.dumps(SCHEMA)),
        ),
        ({"type": "regex", "regex": "[ab]+"}, Grammar("regex", "[ab]+")),
        ({"type": "ebnf", "ebnf": 'root ::= "a"', "json_schema": None}, Grammar("ebnf", 'root ::= "a"')),
    ],
)
def test_a_form_is_read_as_it_is_and_as_json_text(form: Any, expected: Grammar | None) -> None:
    assert read_grammar(form) == expected
    assert read_grammar(json.dumps(form)) == expected


@pytest.mark.parametrize(
    "form",
    [
        "text",
        "[1]",
        7,
        [],
        {"type": "yaml"},
        {"regex": "a"},
        {"type": "regex"},
        {"type": "regex", "regex": ""},
        {"type": "regex", "regex": 3},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": "{}"}},
        {"type": "json_schema", "json_schema": {"schema": {"enum": [object()]}}},
    ],
)
def test_another_form_is_refused_with_those_there_are(form: Any) -> None:
    with pytest.raises(RefusedError, match="response_format is"):
        read_grammar(form)
