"""The values of a row that a message can carry: no other value gets into a task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from asyncrl.errors import WireError
from asyncrl.types import without_nulls
from asyncrl.wire import check_plain, pack

MAX_DEPTH = 64
"""The deepest nesting of lists and maps in a row. Messages may be deeper, since they put rows into lists."""


def schemas(tools: Any) -> list[Any]:
    """The OpenAI schemas in JSON text, or the one in a mapping or its JSON text. Raises ValueError."""
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
    """Raises ValueError: a plain value is no schema of a tool."""
    match schema.get("function", schema) if isinstance(schema, dict) else None:
        case {"name": str(), **rest} if isinstance(rest.get("parameters", {}), dict):
            return
    raise ValueError(f"a schema must be {{name, description, parameters}}, in an OpenAI tool or alone: {schema!r:.100}")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)


def parse_json(text: str) -> Any:
    """The value of a JSON text. NaN and infinities are none. Raises ValueError, RecursionError."""
    return _JSON.decode(text)


def check_sendable(value: Any) -> None:
    """Raises WireError, ValueError or TypeError: no message can carry the value."""
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:  # A message can carry larger integers, but would replace half of a surrogate pair.
        msgspec.json.encode(value)
        pack(value, "the row")
    check_plain(value, MAX_DEPTH)


def message_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message as tasks have it: fields that are null are left out, but the arguments of calls may be null."""
    if all(type(value) is str for value in given.values()):
        return dict(given)
    found: dict[str, Any] = without_nulls({name: value for name, value in given.items() if name != "tool_calls"})
    calls = given.get("tool_calls")
    return found if calls is None else {**found, "tool_calls": calls}


def check_depth(value: Any) -> None:
    """Raises WireError or ValueError: no message can carry a value that `plain` made or that was read from JSON. It is
    nested too deep, or has text without an encoding."""
    text = msgspec.json.encode(value)
    # Each list and map has a bracket: few of them cannot be deep. To look at all values takes ten times as long.
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        check_plain(msgspec.to_builtins(value, builtin_types=(bytes,)), MAX_DEPTH)


def plain(value: Any) -> Any:
    """The value as one that a message can carry: arrays of NumPy are lists, and dates and decimals are texts."""
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
