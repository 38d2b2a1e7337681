"""What a message can carry of the values in a row: no other value gets into a task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.errors import WireError
from asyncrl.wire import check_plain

MAX_DEPTH = 64
"""Of lists and maps within a row. Messages may be deeper, since they put rows into lists."""


def schemas(tools: Any) -> list[Any]:
    """The OpenAI schemas in JSON text, or the one in a mapping or its JSON text. Raises ValueError."""
    try:
        parsed = parse_json(tools) if isinstance(tools, str) else plain(tools)
        found = parsed if isinstance(parsed, list) else [parsed]
        for schema in found:
            _check_schema(schema)
        check_sendable(found)
    except (WireError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return found


def _check_schema(schema: Any) -> None:
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
    """Raises WireError, ValueError, TypeError or OverflowError: no message can carry the value."""
    msgspec.msgpack.encode(value)
    check_plain(value, MAX_DEPTH)


def plain(value: Any) -> Any:
    """Values that a message can carry, without nulls. Parquet gives every struct all fields of its column; fields that
    the row never had are null."""
    if isinstance(value, Mapping):
        return {name: plain(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value if value is None or isinstance(value, (str, int, float, bytes)) else str(value)
