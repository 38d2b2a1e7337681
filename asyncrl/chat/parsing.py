"""Parses an assistant turn into content, reasoning and tool calls.

The model's format finds the calls (`asyncrl.chat.formats`). If a call cannot be made as the policy wrote it, it becomes
a `MalformedCall`, and the policy reads its error. Calls within thoughts are ignored, even if the thought never ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.chat.formats.base import CallError, Format, Functions, WrittenCall
from asyncrl.chat.formats.schemas import may_have, parameters_of, problem_of
from asyncrl.types import ToolCall


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that was not made; the policy reads `error` instead of a result.

    `unknown`: no tool has this name. `arguments`: what the policy wrote in place of a JSON object, or None.
    """

    error: str
    name: str = "unknown"
    unknown: bool = False
    arguments: Any = None


class ParsedTurn(NamedTuple):
    """An assistant turn.

    - `content`: the policy's text without its calls; the whole text if a call is malformed
    - `reasoning`: the policy's reasoning, if the format has `reasoning_apart`; otherwise empty
    - `ids`: the id that the policy gave each call; an empty text if it gave none
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall | MalformedCall, ...] = ()
    ids: tuple[str, ...] = ()

    @property
    def made(self) -> tuple[ToolCall, ...]:
        """The calls; none if one of them is malformed."""
        made = tuple(call for call in self.calls if isinstance(call, ToolCall))
        return made if len(made) == len(self.calls) else ()


def parse_turn(text: str, functions: Functions, format: Format, one_call: bool = False) -> ParsedTurn:
    """Parse the assistant turn `text`, with its calls in order.

    `problem_of_arguments` checks the arguments. With `one_call`, a turn may have one call only: several calls become
    one malformed call.
    """
    found: list[tuple[ToolCall | MalformedCall, str]] = []
    said: list[str] = []
    position = after = 0
    thinking = False
    while mark := format.mark.search(text, position):
        position, groups = mark.end(), mark.groupdict()
        if groups.get("thought"):
            thinking = bool(groups["opened"])
            found, said, after = [], [], 0
        if thinking or groups.get("thought"):
            continue
        try:
            written, end = format.read(mark, functions)
        except CallError as unreadable:
            written, end = [unreadable], position
        position = max(position, end)
        if written:
            said.append(text[after : mark.start()])
            after = position
        found += ((_checked(each, functions), each.id) for each in written)
    calls, ids = tuple(call for call, _ in found), tuple(id for _, id in found)
    if one_call and len(calls) > 1:
        error = f"Error: one tool call at a time; none of these {len(calls)} was made."
        calls, ids = (MalformedCall(error, calls[0].name),), ids[:1]
    turn = ParsedTurn("", "", calls, ids)
    is_made = bool(turn.made)
    apart = "".join([*said, text[after:]]) if format.text_after_calls else "".join(said[:1])
    reasoning, content = format.split(apart if is_made else text)
    return ParsedTurn(content.strip() if is_made else content, reasoning, calls, ids)


def _checked(written: WrittenCall | CallError, functions: Functions) -> ToolCall | MalformedCall:
    name = written.name
    if isinstance(written, CallError):
        known = name if name in functions else "unknown"
        return MalformedCall(f"Error: {written}.", known, arguments=written.arguments)
    if name not in functions:
        return MalformedCall(f"Error: there is no tool {name!r:.80}; there are: {', '.join(functions)}.", unknown=True)
    problem = problem_of_arguments(written.arguments, functions[name])
    return MalformedCall(f"Error: {problem}.", name) if problem else ToolCall(name, written.arguments)


def problem_of_arguments(arguments: Mapping[str, Any], function: Mapping[str, Any]) -> str:
    """The fault of a call's arguments, given the function object of its tool; empty if there is none.

    It covers presence, type and listed values, but no nested values.
    """
    parameters = parameters_of(function)
    properties = parameters.get("properties") or {}
    for name in parameters.get("required") or ():
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            if may_have(name, function):
                continue
            return f"there is no argument {name!r:.80}; there are: {', '.join(properties) or 'none'}"
        if problem := problem_of(properties[name], value, function):
            return f"argument {name!r} {problem}"
    return ""
