"""Hermes, Qwen 2.5, Qwen3, QwQ: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number in one turn."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncrl.chat.formats.base import CallError, Format, Functions, WrittenCall, closed, read_json, to_json

_FORM = 'a tool call must be {"name": "...", "arguments": {...}}'
_CLOSING = re.compile(r"\s*</tool_call>")


class Hermes(Format):
    """A format whose calls are JSON. The JSON is read before the closing mark is looked for, because texts in the JSON
    may contain this mark."""

    name = "hermes"
    mark = closed("<tool_call>")

    def read(self, mark: re.Match[str], functions: Functions) -> tuple[Sequence[WrittenCall | CallError], int]:
        text = mark.string
        value, end = read_json(text, mark.end())
        closing = _CLOSING.match(text, end)
        if closing is None:
            return [CallError("</tool_call> must follow the JSON object of a tool call")], end
        match value:
            case {"name": str(name), "arguments": dict(arguments), **rest} if not rest:
                return [WrittenCall(name, arguments)], closing.end()
            case {"name": str(name), "arguments": arguments, **rest} if not rest:
                return [CallError(_FORM, name, arguments=arguments)], closing.end()
        return [CallError(_FORM)], closing.end()

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "\n".join(
            f"<tool_call>\n{to_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in calls
        )
