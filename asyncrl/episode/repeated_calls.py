"""Finds the tool calls of the policy's turns that the prompt of a new branch repeats."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

from asyncrl.chat.history import Message, texts_of
from asyncrl.episode.branches import Prefix
from asyncrl.types import ToolCall


def repeated_calls(messages: Sequence[Message], completions: Iterable[Prefix]) -> list[ToolCall]:
    """The tool calls of the completions that `messages` repeat, in the order of the messages."""
    # To compare two turns takes time, so only completions with calls and the same text are compared.
    by_text = defaultdict[str, deque[Prefix]](deque)
    for each in completions:
        turns = (each.messages[-1], each.shown or each.messages[-1]) if each.turn.tool_calls else ()
        for text in {text for turn in turns for text in texts_of(turn)}:
            by_text[text].append(each)
    made: list[ToolCall] = []
    for message in messages if by_text else ():
        if message["role"] == "assistant" and (found := _repeated(message, by_text)):
            made += found.turn.tool_calls
    return made


def _repeated(message: Message, by_text: Mapping[str, deque[Prefix]]) -> Prefix | None:
    """The completion that a message repeats. Completions are repeated in their order, so the search goes on after the
    one that was found last."""
    for completions in (by_text[text] for text in texts_of(message) if text in by_text):
        for _ in range(len(completions)):
            completions.rotate(-1)
            if completions[-1].is_repeated_as(message):
                return completions[-1]
    return None
