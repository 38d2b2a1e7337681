"""GLM 4.5 and 4.6: `<tool_call>name`, then `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for each
argument.

Strings are written unchanged, other values as JSON. A string that contains `</arg_value>`, `<arg_value>` or `<arg_key>`
cannot be written. `<arg_value>` or `<arg_key>` within a value show that the end of the value is missing.
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

_CLOSE, _KEY, _VALUE = "</tool_call>", "<arg_key>", "<arg_value>"
_OPENING = (_KEY, _VALUE)
_NAME = re.compile(r"\s*([^\s<>{}]+)")


class Glm(Format):
    """A format in which the type of an argument comes from the tool's schema: see `from_text`."""

    name = "glm"
    mark = closed("<tool_call>")
    stop_tokens = ("<|observation|>", "<|user|>")

    def read(self, mark: re.Match[str], functions: Functions) -> tuple[Sequence[WrittenCall | CallError], int]:
        text = mark.string
        found = _NAME.match(text, mark.end())
        if found is None:
            raise CallError("the name of a tool must follow <tool_call>")
        name, end = found[1], found.end()
        arguments: dict[str, Any] = {}
        while text.startswith(_KEY, begin := skip_space(text, end)):
            key, end = read_until(text, begin + len(_KEY), "</arg_key>", "the key of an argument", _OPENING)
            start = expect(text, end, _VALUE, "</arg_key>")
            value, end = read_until(text, start, "</arg_value>", "a value", _OPENING)
            arguments[key.strip()] = from_text(value, name, key.strip(), functions)
        return [WrittenCall(name, arguments)], expect(text, end, _CLOSE, "the arguments of a tool call")

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "\n".join(
            f"<tool_call>{call.name}\n"
            + "".join(
                f"{_KEY}{key}</arg_key>\n{_VALUE}{as_text(value)}</arg_value>\n"
                for key, value in call.arguments.items()
            )
            + _CLOSE
            for call in calls
        )
