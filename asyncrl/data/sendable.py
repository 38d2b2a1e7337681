"""Checks that messages between processes can carry the values of a row, and converts values that they cannot carry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from asyncrl.errors import WireError
from asyncrl.msgpack_values import check_plain, pack
from asyncrl.types import without_nulls

MAX_DEPTH = 64
"""The maximum depth to which lists and maps may be nested in a row. Messages may be nested deeper, because they contain
rows within lists."""


def schemas(tools: Any) -> list[Any]:
    """The OpenAI schemas in a mapping (one schema) or in JSON text (one schema or a list). Raises ValueError."""
    try:
        parsed = parse_json(tools) if isinstance(tools, str) else plain(tools)
        found = parsed if isinstance(parsed, list) else [parsed]
        for schema in found:
            check_schema(schema)
        check_sendable(found)
    except (WireError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return found


def check_schema(schema: Any) -> None:
    """Raises ValueError: a plain value is not the schema of a tool."""
    match schema.get("function", schema) if isinstance(schema, dict) else None:
        case {"name": str(), **rest} if isinstance(rest.get("parameters", {}), dict):
            return
    raise ValueError(
        f"a schema must be {{name, description, parameters}}, alone or as `function` of an OpenAI tool: {schema!r:.100}"
    )


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_JSON = json.JSONDecoder(parse_constant=_no_number)


def parse_json(text: str) -> Any:
    """The value of a JSON text. NaN and infinity are errors. Raises ValueError, RecursionError."""
    return _JSON.decode(text)


def check_sendable(value: Any) -> None:
    """Raises WireError, ValueError or TypeError: no message can carry the value."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        # An integer may be too large for msgspec. `pack` can write it. But `pack` would also replace half of a
        # surrogate pair in a text, so the JSON encoder must refuse such a text first.
        msgspec.json.encode(value)
        pack(value, "the row")
    check_plain(value, MAX_DEPTH)


def message_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message without its null fields. Nulls within its tool calls stay, because an argument may be null."""
    if all(type(value) is str for value in given.values()):
        return dict(given)
    found: dict[str, Any] = without_nulls({name: value for name, value in given.items() if name != "tool_calls"})
    calls = given.get("tool_calls")
    return found if calls is None else {**found, "tool_calls": calls}


def check_depth(value: Any) -> None:
    """Raises WireError or ValueError: the value is nested too deep, or has text that UTF-8 cannot encode.

    The value must come from `plain` or from JSON.
    """
    text = msgspec.json.encode(value)
    # Each list and map has an opening bracket. If there are few brackets, nesting cannot be deep, and a walk over all
    # values, which is 10 times slower, is not needed.
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        check_plain(msgspec.to_builtins(value, builtin_types=(bytes,)), MAX_DEPTH)


def plain(value: Any) -> Any:
    """The value in types that a message can carry: NumPy arrays become lists; dates and decimals become texts."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool, bytes):
        return value
    if kind is dict or isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return value if isinstance(value, (str, int, float, bytes)) else str(value)
