"""Tool calls in the hermes form: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number in one turn.

A call that cannot be made as written is a `MalformedCall`, whose error the policy reads. Calls within thoughts, before
`</think>`, are ignored. The arguments of a call can be sent and stored: see `_check_plain`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.types import ToolCall

CALL_MARK = "<tool_call>"
_CLOSE = "</tool_call>"
_CLOSING = re.compile(r"\s*" + _CLOSE)
_MARK = re.compile(f"{CALL_MARK}|</think>")
_SPACE = re.compile(r"\s*")
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that was not made; the policy reads `error` in place of a result. With `unknown` there is no such tool."""

    error: str
    name: str = "unknown"
    unknown: bool = False


def parse_tool_calls(
    text: str, schemas: Mapping[str, Mapping[str, Any]], one_call: bool = False
) -> tuple[ToolCall | MalformedCall, ...]:
    """The calls in an assistant turn, in order. `schemas` maps a tool's name to its OpenAI function object.

    Arguments are checked for presence, type and enum; nested values are left to the tool. With `one_call` several calls
    are one malformed call.
    """
    calls: list[ToolCall | MalformedCall] = []
    position = 0
    while mark := _MARK.search(text, position):
        position = mark.end()
        if mark.group() == CALL_MARK:
            call, position = _read_call(text, position, schemas)
            calls.append(call)
        else:
            calls.clear()
    if one_call and len(calls) > 1:
        error = f"Error: one tool call at a time; none of these {len(calls)} was made."
        return (MalformedCall(error, calls[0].name),)
    return tuple(calls)


def _read_call(text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[ToolCall | MalformedCall, int]:
    """The call whose body starts at `start`, and the position behind it. JSON is read first: it may contain marks."""
    begin = _SPACE.match(text, start).end()  # type: ignore[union-attr]
    try:
        value, end = _decoder.raw_decode(text, begin)
        _check_plain(value)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        return MalformedCall(f"Error: the tool call is not valid JSON: {reason}."), start
    closing = _CLOSING.match(text, end)
    if closing is None:
        return MalformedCall(f"Error: {_CLOSE} must follow the JSON object of a tool call."), end
    return _checked(value, schemas), closing.end()


def _checked(value: Any, schemas: Mapping[str, Mapping[str, Any]]) -> ToolCall | MalformedCall:
    match value:
        case {"name": str(name), "arguments": dict(arguments), **rest} if not rest:
            pass
        case _:
            return MalformedCall('Error: a tool call must be {"name": "...", "arguments": {...}}.')
    if name not in schemas:
        return MalformedCall(f"Error: there is no tool {name!r:.80}; there are: {', '.join(schemas)}.", unknown=True)
    problem = _problem(arguments, schemas[name].get("parameters") or {})
    return MalformedCall(f"Error: {problem}.", name) if problem else ToolCall(name, arguments)


def _problem(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """What is wrong with the arguments; empty if nothing is."""
    properties = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            if parameters.get("additionalProperties"):
                continue
            return f"there is no argument {name!r:.80}; there are: {', '.join(properties) or 'none'}"
        if problem := _value_problem(value, properties[name]):
            return f"argument {name!r} {problem}"
    return ""


def _value_problem(value: Any, schema: Mapping[str, Any] | bool) -> str:
    if isinstance(schema, bool):
        return "" if schema else "must be left out"
    expected = schema.get("type")
    kinds: Sequence[str] = [expected] if isinstance(expected, str) else expected or ()
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"must be of type {' or '.join(kinds)}"
    allowed = schema.get("enum")
    if allowed and value not in allowed:
        return f"must be one of {json.dumps(allowed)}"
    return ""


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, object))


def _check_plain(value: Any, depth: int = 0) -> None:
    """Refuse values that Python's JSON takes but msgpack or UTF-8 do not. They would fail at the episode's delivery."""
    match value:
        case dict() | list():
            if depth == _MAX_DEPTH:
                raise ValueError("nested too deeply")
            for item in value:
                _check_plain(item, depth + 1)
            if isinstance(value, dict):
                _check_plain(list(value.values()), depth)
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("half of a surrogate pair") from None
        case int() if not -(2**63) <= value < 2**63:
            raise ValueError("an integer has more than 64 bits")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)
