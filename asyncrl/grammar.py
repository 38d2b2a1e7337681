"""Reads the grammar that a user gives: a regular expression, an EBNF grammar, or a `response_format` as in the
chat-completions API.

A server restricts the sampled tokens of a whole assistant turn to the grammar. docs/engines.md lists the servers that
can do this, and explains how the learner treats such turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import RefusedError
from asyncrl.types import Grammar

KEY = "response_format"
"""The key of the grammar in a request, in the configuration, and in a task's `extra_info`."""
FORMS = (
    '{type: text}, {type: json_object}, {type: json_schema, json_schema: {name: "...", schema: {...}}}, '
    '{type: regex, regex: "..."} or {type: ebnf, ebnf: "..."}'
)


def read_grammar(form: Any) -> Grammar | None:
    """The grammar that `form`, a mapping or JSON text, describes. None if the form leaves the text free.

    Raises RefusedError: the form is unknown, or is text but not JSON.
    """
    try:
        form = json.loads(form) if isinstance(form, str) else form
        match form:
            case None:
                return None
            case Mapping() if not form:
                return None
            case {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return Grammar("json_schema", json.dumps({"type": "object"}))
            case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
                return Grammar("json_schema", json.dumps(schema))
            case {"type": "regex" | "ebnf" as kind} if isinstance(form.get(kind), str) and form[kind]:
                return Grammar(kind, form[kind])
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError(f"{KEY} is not JSON: {error}") from error
    raise RefusedError(f"{KEY} is {form!s:.200}; use {FORMS}")
