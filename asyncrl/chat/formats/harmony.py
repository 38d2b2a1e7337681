"""GPT-OSS: the format harmony. A turn has one or more messages, each on a channel. A call is a message to
`functions.name`.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}

A call ends with `<|call|>`. An answer is on the channel `final`, and ends with `<|return|>`. Both end the turn.

The recipient (`to=...`) follows `assistant` or the channel. Reasoning is on the channel `analysis`.

Source: OpenAI's harmony response format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncrl.chat.formats.base import (
    CallError,
    Format,
    Functions,
    WrittenCall,
    read_arguments,
    to_json,
)

_MESSAGE = re.compile(
    r"(?:\A|<\|start\|>)(?P<header>[^<]*+(?:<\|(?:channel|constrain)\|>[^<]*+){0,3}+)<\|message\|>"
    r"(?P<body>.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_END = re.compile(r"\s*(?:\Z|<\|(?:end|call|start)\|>)")


class Harmony(Format):
    """A format in which thoughts are separate messages, so `mark` finds no thoughts."""

    name = "harmony"
    mark = re.compile(
        r"(?:\A\s*+|<\|start\|>assistant\s*+|<\|channel\|>\s*+\w++\s*+)to=(?:functions\.)?(?P<name>[^\s<]++)"
        r"[^<]*+(?:<\|(?:channel|constrain)\|>[^<]*+){0,3}+<\|message\|>"
    )
    stop_tokens = ("<|call|>", "<|return|>")
    reasoning_apart = True

    def read(self, mark: re.Match[str], functions: Functions) -> tuple[Sequence[WrittenCall | CallError], int]:
        name = mark["name"]
        try:
            arguments, end = read_arguments(mark.string, mark.end())
        except CallError as error:
            raise CallError(str(error), name) from None
        if _END.match(mark.string, end) is None:
            raise CallError("nothing may follow the JSON object of a tool call", name)
        return [WrittenCall(name, arguments)], end

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "<|end|><|start|>assistant".join(
            f" to=functions.{call.name}<|channel|>commentary json<|message|>{to_json(call.arguments)}" for call in calls
        )

    def split(self, text: str) -> tuple[str, str]:
        reasoning, content = [], []
        for message in _MESSAGE.finditer(text):
            header = message["header"]
            if "<|channel|>analysis" in header:
                reasoning.append(message["body"])
            elif " to=" not in header:
                content.append(message["body"])
        if not (reasoning or content) and "<|message|>" not in text:
            return "", text
        return "\n".join(reasoning), "\n".join(content)

    def join(self, reasoning: str, content: str) -> str:
        thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
        return f"{thought}<|channel|>final<|message|>{content}"
