"""Reads and writes tool calls in the formats of Mistral.

- Tokenizers v3 to v7 (7B v0.3, Nemo, Large): `[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`, with all
  calls of a turn in the list.
- From v11 on (Small 3.2, Devstral, Magistral): `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}` for each call. v13 has no id.

The policy writes the id of a call, nine letters or digits, and the result of the call repeats it.
Source: mistral-common's instruct tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncrl.chat.formats.base import (
    CallError,
    Format,
    Functions,
    WrittenCall,
    closed,
    read_arguments,
    read_json,
    to_json,
)

_MARK = closed(r"\[TOOL_CALLS\]", r"(?:<think>|\[THINK\])", r"(?:</think>|\[/THINK\])")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_HEAD = re.compile(r"\s*+([^\[\]{}\s]++)\s*+(?:\[CALL_ID\]\s*+([^\[\]\s]*+)\s*+)?\[ARGS\]")
_BAD_ID = "the id of a tool call must have nine letters or digits"


class Mistral(Format):
    """A format with one list of all calls of the turn."""

    name = "mistral"
    mark = _MARK

    def read(self, mark: re.Match[str], functions: Functions) -> tuple[Sequence[WrittenCall | CallError], int]:
        value, end = read_json(mark.string, mark.end())
        if not isinstance(value, list):
            raise CallError("a list of tool calls must follow [TOOL_CALLS]")
        return [self._call(each) for each in value], end

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "[TOOL_CALLS]" + to_json(
            [{"name": call.name, "arguments": call.arguments, **({"id": call.id} if call.id else {})} for call in calls]
        )

    def _call(self, value: object) -> WrittenCall | CallError:
        match value:
            case {"name": str(name), "arguments": dict(arguments), **rest} if rest.keys() <= {"id"}:
                match rest.get("id", ""):
                    case str(id) if not id or _ID.fullmatch(id):
                        return WrittenCall(name, arguments, id)
                return CallError(_BAD_ID, name)
        return CallError('a tool call must be {"name": "...", "arguments": {...}}')


class MistralV11(Format):
    """A format with a mark before each call."""

    name = "mistral_v11"
    mark = _MARK

    def read(self, mark: re.Match[str], functions: Functions) -> tuple[Sequence[WrittenCall | CallError], int]:
        text = mark.string
        head = _HEAD.match(text, mark.end())
        if head is None:
            raise CallError("a tool's name and [ARGS] must follow [TOOL_CALLS]")
        name, id = head[1], head[2] or ""
        if head[2] is not None and not _ID.fullmatch(id):
            raise CallError(_BAD_ID, name)
        try:
            arguments, end = read_arguments(text, head.end())
        except CallError as error:
            raise CallError(str(error), name, id) from None
        return [WrittenCall(name, arguments, id)], end

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "".join(
            f"[TOOL_CALLS]{call.name}{f'[CALL_ID]{call.id}' if call.id else ''}[ARGS]{to_json(call.arguments)}"
            for call in calls
        )
