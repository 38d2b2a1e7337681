"""Makes tasks from requests and the tool calls that answer them, such as xLAM's data set.

The rule `tool_calls` scores them. The tools exist only as schemas and cannot run. So an episode is a single turn, and a
special agent plays it (docs/data.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.data.converters.rows import json_of, published_rows, text_of
from asyncrl.data.sendable import check_sendable
from asyncrl.errors import DataError, WireError
from asyncrl.types import Task

_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "dict": "object",
}


def tasks(source: str, name: str = "xlam") -> Iterator[Task]:
    """The tasks. Raises DataError.

    Rows have `query`, `tools` (each with name, description and parameters) and `answers` (calls with name and
    arguments). `tools` and `answers` are lists or JSON text. Parameters are a JSON schema, or a mapping from each
    parameter to its description, Python type and default.
    """
    for place, row in published_rows(source):
        try:
            tools = [_schema(tool) for tool in _parsed(row["tools"])]
            calls = [_call(call) for call in _parsed(row["answers"])]
            check_sendable([tools, calls])
            query = text_of(row.get("query"))
            if not query:
                raise ValueError("the query is not text")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, WireError) as error:
            raise DataError(f"{place} does not have query, tools and answers: {error!r}") from error
        yield Task(
            id=place,
            messages=[{"role": "user", "content": query}],
            ground_truth=json.dumps(calls, ensure_ascii=False),
            data_source=name,
            tools=tools,
        )


def _parsed(value: Any) -> list[Any]:
    found = json_of(value)
    if not isinstance(found, list):
        raise TypeError(f"not a list: {found!r:.100}")
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as a mapping. Some sets have the arguments as JSON text."""
    return {"name": _text(call["name"]), "arguments": {**json_of(call.get("arguments") or {})}}


def _text(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a name must be text, not {name!r:.100}")
    return name


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool)
    parameters = function.get("parameters") or {}
    if parameters.get("type") not in ("object", "dict") or not isinstance(parameters.get("properties"), Mapping):
        parameters = _described(parameters)
    described = {"description": function["description"]} if function.get("description") else {}
    return {
        "type": "function",
        "function": {"name": _text(function["name"]), **described, "parameters": {**parameters, "type": "object"}},
    }


def _described(parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of parameters such as {"city": {"description": "a town", "type": "str, optional"}}."""
    properties, required = {}, []
    for name, each in parameters.items():
        given = str(each.get("type", "str"))
        kind = re.match(r"(?:Optional\[)?([a-z]+)", given, re.IGNORECASE)
        known = {name: each[name] for name in ("description", "default", "enum") if each.get(name) not in (None, "")}
        properties[name] = {"type": _TYPES.get(kind.group(1).lower() if kind else "", "string"), **known}
        if "default" not in each and "optional" not in given.lower():
            required.append(name)
    return {"properties": properties, "required": required}
