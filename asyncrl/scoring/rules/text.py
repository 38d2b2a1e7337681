"""Fenced blocks, boxes and answer tags of an answer, found in time linear in its length."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([^`\n]*)")
_BOX = re.compile(r"\\f?boxed\s{0,9}\{")
_BRACES = re.compile(r"\\?[{}]")
_ANSWER = re.compile(r"<(/?)answer>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `language` is the first word after its opening fence, in small letters, or empty."""

    language: str
    body: str


@dataclass(frozen=True, slots=True)
class Box:
    r"""The content of a `\boxed{...}`, and the span [start, end) of the whole box in its text."""

    content: str
    start: int
    end: int


def fenced_blocks(text: str) -> Iterator[Block]:
    """The blocks between fences of backticks or tildes, which may be indented. A block without a closing fence, for
    example in a truncated answer, reaches to the end of the text."""
    fence, indent, language, body = "", "", "", list[str]()
    for line in text.splitlines():
        found = _FENCE.fullmatch(line)
        if fence and found and found[2].startswith(fence) and not found[3].strip():
            yield Block(language, "\n".join(body))
            fence = ""
        elif fence:
            body.append(line.removeprefix(indent))
        elif found:
            indent, fence, info = found.groups()
            language, body = (info.strip(" {.}").lower().split() or [""])[0], []
    if fence:
        yield Block(language, "\n".join(body))


def boxes(text: str) -> list[Box]:
    """All closed boxes, in order; of nested boxes only the inner one."""
    starts = list(_BOX.finditer(text))
    ends = [each.start() for each in starts[1:]] + [len(text)] * bool(starts)
    found = []
    for start, end in zip(starts, ends, strict=True):
        depth = 1
        for brace in _BRACES.finditer(text, start.end(), end):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                found.append(Box(text[start.end() : brace.start()], start.start(), brace.end()))
                break
    return found


def tagged(text: str) -> str:
    """The content of the last closed `<answer>...</answer>`, or the whole text if there is none."""
    inside, start = text, None
    for tag in _ANSWER.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            inside, start = text[start : tag.start()], None
    return inside
