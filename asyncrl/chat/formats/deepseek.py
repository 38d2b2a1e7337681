"""Reads and writes tool calls in the formats of DeepSeek.

V3, R1 and the models distilled from R1 write `type<｜tool▁sep｜>name`, a newline, and the arguments as a JSON block of
markdown. V3.1 writes `name<｜tool▁sep｜>{...}`.

Each call is between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`. All calls of a turn are between
`<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.
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
    expect,
    read_arguments,
    read_until,
    to_json,
)

_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_OTHERS = (_BEGIN, _END)
_MARK = closed(rf"(?:{_ALL}\s*)?{_BEGIN}")


class DeepSeekV3(Format):
    """The format of V3. Its calls have a type, which is always `function` and is ignored."""

    name = "deepseek_v3"
    mark = _MARK

    def read(self, mark: re.Match[str], functions: Functions) -> tuple[Sequence[WrittenCall | CallError], int]:
        text = mark.string
        _, after = read_until(text, mark.end(), _SEP, "the type of a tool call", _OTHERS)
        line, after = read_until(text, after, "\n", "the name of a tool", _OTHERS)
        after = expect(text, after, "```json", "the name of a tool")
        arguments, end = read_arguments(text, after)
        end = expect(text, end, "```", "the arguments of a tool call")
        return [WrittenCall(line.strip(), arguments)], expect(text, end, _END, "a tool call")

    def write(self, calls: Sequence[WrittenCall]) -> str:
        written = (
            f"{_BEGIN}function{_SEP}{call.name}\n```json\n{to_json(call.arguments)}\n```{_END}" for call in calls
        )
        return _ALL + "\n".join(written) + _ALL_END


class DeepSeekV31(Format):
    """The format of V3.1. Its calls have no type and no markdown."""

    name = "deepseek_v3_1"
    mark = _MARK

    def read(self, mark: re.Match[str], functions: Functions) -> tuple[Sequence[WrittenCall | CallError], int]:
        text = mark.string
        name, after = read_until(text, mark.end(), _SEP, "the name of a tool", _OTHERS)
        arguments, end = read_arguments(text, after)
        return [WrittenCall(name.strip(), arguments)], expect(text, end, _END, "the arguments of a tool call")

    def write(self, calls: Sequence[WrittenCall]) -> str:
        written = (f"{_BEGIN}{call.name}{_SEP}{to_json(call.arguments)}{_END}" for call in calls)
        return _ALL + "".join(written) + _ALL_END
