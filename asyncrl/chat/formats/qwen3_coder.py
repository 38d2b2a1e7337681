"""Qwen3-Coder: `<tool_call>` and `<function=name>` around `<parameter=key>` for each argument, each on its own line.

Strings are written unchanged, other values as JSON or as in Python. A string that contains `</parameter>` or
`<parameter=` cannot be written. `<parameter=` within a value shows that the end of the value is missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from asyncrl.chat.formats.base import (
    CallError,
    Format,
    Functions,
    WrittenCall,
    as_text,
    closed,
    expect,
    from_text,
    read_until,
    skip_space,
)

_FUNCTION, _PARAMETER = "<function=", "<parameter="


class Qwen3Coder(Format):
    """A format in which the type of an argument comes from the tool's schema: see `from_text`."""

    name = "qwen3_coder"
    mark = closed("<tool_call>")

    def read(self, mark: re.Match[str], functions: Functions) -> tuple[Sequence[WrittenCall | CallError], int]:
        text = mark.string
        name, end = read_until(text, expect(text, mark.end(), _FUNCTION, "<tool_call>"), ">", "the name of a tool")
        name = name.strip()
        arguments: dict[str, Any] = {}
        while text.startswith(_PARAMETER, begin := skip_space(text, end)):
            key, end = read_until(text, begin + len(_PARAMETER), ">", "the name of a parameter", [_PARAMETER])
            value, end = read_until(text, end, "</parameter>", "a value", [_PARAMETER])
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key.strip()] = from_text(value, name, key.strip(), functions)
        end = expect(text, end, "</function>", "the parameters of a tool call")
        return [WrittenCall(name, arguments)], expect(text, end, "</tool_call>", "</function>")

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "\n".join(
            f"<tool_call>\n{_FUNCTION}{call.name}>\n"
            + "".join(f"{_PARAMETER}{key}>\n{as_text(value)}\n</parameter>\n" for key, value in call.arguments.items())
            + "</function>\n</tool_call>"
            for call in calls
        )
