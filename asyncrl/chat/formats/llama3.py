"""Llama 3.1 to 3.3: a turn that begins with `{"name": ..., "parameters": {...}}`, or with `<|python_tag|>`.

`<|python_tag|>` is followed by such JSON, by a call of a built-in tool such as `brave_search.call(query="...")`, or by
a program for the tool `python` (`code_interpreter`, `ipython`). Several JSON calls are separated by `;`, or only by
blanks if the policy omits `;`. A turn with `<|python_tag|>` may end with `<|eom_id|>`.
Source: Meta's prompt format of Llama 3.1.
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
    closed,
    expect,
    read_json,
    skip_space,
    to_json,
)

_BUILT_IN = re.compile(r"\s*(\w+)\.call\(")
_KEY = re.compile(r"\s*(\w+)\s*=")
_PYTHON = ("python", "code_interpreter", "ipython")
_BEGUN = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function")')


class Llama3(Format):
    """A format in which a turn of JSON that is not a call, such as `{"answer": 15}`, is an answer."""

    name = "llama3"
    mark = closed(r"<\|python_tag\|>|\A\s*+\{")
    stop_tokens = ("<|eom_id|>",)
    text_after_calls = True

    def read(self, mark: re.Match[str], functions: Functions) -> tuple[Sequence[WrittenCall | CallError], int]:
        text, start = mark.string, mark.end()
        tagged = mark.group().startswith("<")
        if not tagged:
            start -= 1
        elif built_in := _BUILT_IN.match(text, start):
            return self._built_in(text, built_in)
        elif not text.startswith("{", skip_space(text, start)):
            return [self._program(text[start:], functions)], len(text)
        calls: list[WrittenCall | CallError] = []
        while True:
            begun = _BEGUN.match(text, skip_space(text, start)) is not None
            try:
                value, start = read_json(text, start)
            except CallError:
                if not (tagged or begun or calls):
                    return [], len(text)
                raise
            call = self._call(value)
            if not (call or tagged or calls):
                return [], len(text)
            calls.append(call or CallError('a tool call must be {"name": "...", "parameters": {...}}'))
            following = skip_space(text, start)
            if text.startswith(";", following):
                start = following + 1
            elif not self._begins(text, following):
                return calls, start

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "; ".join(f'{{"name": {to_json(call.name)}, "parameters": {to_json(call.arguments)}}}' for call in calls)

    def _begins(self, text: str, start: int) -> bool:
        """True if a call begins at `start`, even a broken one."""
        if _BEGUN.match(text, start):
            return True
        try:
            return self._call(read_json(text, start)[0]) is not None
        except CallError:
            return False

    def _call(self, value: Any) -> WrittenCall | None:
        match value:
            case {"name": str(name), "parameters": dict(arguments), **rest} if rest in ({}, {"type": "function"}):
                return WrittenCall(name, arguments)
        return None

    def _built_in(self, text: str, begin: re.Match[str]) -> tuple[list[WrittenCall], int]:
        arguments: dict[str, Any] = {}
        position = begin.end()
        while key := _KEY.match(text, position):
            arguments[key[1]], position = read_json(text, key.end())
            following = skip_space(text, position)
            position = following + 1 if text.startswith(",", following) else position
        return [WrittenCall(begin[1], arguments)], expect(text, position, ")", "the arguments of a built-in tool")

    def _program(self, program: str, functions: Functions) -> WrittenCall:
        """A call of the tool that runs programs, with the program as its first required argument."""
        name = next((each for each in _PYTHON if each in functions), _PYTHON[0])
        required = (functions.get(name, {}).get("parameters") or {}).get("required") or ["code"]
        return WrittenCall(name, {required[0]: program.strip()})
