"""Makes up arguments for a call of a function, from the JSON schema of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.chat.formats.schemas import admits, parameters_of

VALUES = ("1", 1, 1.0, True, ["1"], None)
"""The values that are tried if a schema gives no example. The text is a number, since many functions that take a text
accept a number in it."""

Function = Mapping[str, Any]


def made_up_arguments(function: Function) -> dict[str, Any] | None:
    """Make up the required arguments of a function from its description in JSON. Each gets the first value that its
    schema admits.

    Returns `None` if no value is found for an argument, such as for an object whose fields are unknown.
    """
    return _object(parameters_of(function), function)


def _object(schema: Mapping[str, Any], function: Function) -> dict[str, Any] | None:
    properties = schema.get("properties") or {}
    made: dict[str, Any] = {}
    for name in schema.get("required") or ():
        found = list(_values(properties.get(name, True), function))
        if not found:
            return None
        made[name] = found[0]
    return made


def _values(schema: Any, function: Function) -> Iterator[Any]:
    """Yield the values that a schema admits, its own examples first."""
    given = schema if isinstance(schema, Mapping) else {}
    listed = [each for name in ("examples", "enum") if isinstance(given.get(name), list) for each in given[name]]
    named = [given[name] for name in ("default", "const", "example", "minimum") if name in given]
    if "items" in given:
        named += [[each] for each in list(_values(given["items"], function))[:1]]
    elif isinstance(given.get("properties"), Mapping) and (inner := _object(given, function)) is not None:
        named.append(inner)
    values = VALUES if "items" not in given else ()
    yield from (each for each in (*listed, *named, *values) if admits(schema, each, function))
