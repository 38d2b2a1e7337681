"""The forms in which users give a grammar: the forms of the chat-completions API's `response_format`, and two of ours.

A server restricts what the policy samples to the grammar, from the first token of an assistant turn to its end.
docs/engines.md says which servers can, and what the learner does with such turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import RefusedError
from asyncrl.types import Grammar

KEY = "response_format"
"""The name of a form in a request, in the configuration, and in a task's `extra_info`."""
FORMS = (
    '{type: text}, {type: json_object}, {type: json_schema, json_schema: {name: "...", schema: {...}}}, '
    '{type: regex, regex: "..."} or {type: ebnf, ebnf: "..."}'
)


def read_grammar(form: Any) -> Grammar | None:
    """The grammar of a form, which may be JSON text; None for free text.

    Raises RefusedError: it is not among `FORMS`.
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
