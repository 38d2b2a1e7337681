"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` for each call.

All calls of a turn are in one section. The policy writes the id of a call. The id consists of the tool's name and the
call's number, counted over the conversation from 0. The result of the call repeats the id.
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

_ALL, _ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"functions\.([^\s:<>]+):\d+")


class Kimi(Format):
    """The format of Kimi K2, whose template expects reasoning in a separate field."""

    name = "kimi"
    mark = closed(rf"(?:{re.escape(_ALL)}\s*)?{re.escape(_BEGIN)}")
    reasoning_apart = True

    def read(self, mark: re.Match[str], functions: Functions) -> tuple[Sequence[WrittenCall | CallError], int]:
        text = mark.string
        id, after = read_until(text, mark.end(), _ARGUMENTS, "the id of a tool call")
        found = _ID.fullmatch(id := id.strip())
        if found is None:
            raise CallError("the id of a tool call must be functions.NAME:NUMBER")
        try:
            arguments, end = read_arguments(text, after)
            end = expect(text, end, _END, "the arguments of a tool call")
        except CallError as error:
            raise CallError(str(error), found[1], id) from None
        return [WrittenCall(found[1], arguments, id)], end

    def write(self, calls: Sequence[WrittenCall]) -> str:
        written = (
            f"{_BEGIN}{call.id or f'functions.{call.name}:{number}'}{_ARGUMENTS}{to_json(call.arguments)}{_END}"
            for number, call in enumerate(calls)
        )
        return _ALL + "".join(written) + _ALL_END

    def join(self, reasoning: str, content: str) -> str:
        return f"<think>{reasoning}</think>{content}" if reasoning else content

    def split(self, text: str) -> tuple[str, str]:
        thought, closing, content = text.rpartition("</think>")
        if not closing and text.lstrip().startswith("<think>"):
            thought, content = text, ""  # A limit cut the turn within its thought.
        return thought.lstrip().removeprefix("<think>"), content
