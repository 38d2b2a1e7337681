"""Compares a request's messages with the conversation that an episode has recorded.

Clients may change an earlier turn of the policy when they send it back. They omit the reasoning, or move it into the
content or into a separate field. They strip blanks, or write calls as text.

So turns of the policy are compared only by content and calls. All other messages must be the same word for word. If
several recorded conversations are the same in this way, `same_thoughts` tells which one the request repeats.

For example, the library smolagents sends calls as text: after the policy's text it writes `Calling tools:` and a list
of calls, as Python prints it. If the policy wrote code, its CodeAgent lists a call of `python_interpreter` with this
code.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.chat.thoughts import split_thought

Message = Mapping[str, Any]

_LISTED = "Calling tools:\n"
_CODE = "python_interpreter"
_LONGEST_LIST = 1 << 20


def repeats(repeated: Sequence[Message], known: Sequence[Message]) -> bool:
    """True if each message of `repeated` is the same as the message of `known` at its place."""
    return len(repeated) == len(known) and all(map(same_message, repeated, known))


def same_message(repeated: Message, known: Message) -> bool:
    """True if a message is the same as `known`, apart from the changes that clients make to turns of the policy."""
    if same_value(repeated, known):
        return True
    if not repeated["role"] == known["role"] == "assistant" or not (_is_text(repeated) and _is_text(known)):
        return False
    said, known_said = _said(repeated), _said(known)
    made, known_made = _calls(repeated), _calls(known)
    return (said == known_said and same_value(made, known_made)) or (not made and _lists(said, known_said, known_made))


def same_thoughts(repeated: Sequence[Message], known: Sequence[Message]) -> int:
    """The number of turns in `repeated` that have the same thought as the turn of `known` at the same place."""
    pairs = ((one, other) for one, other in zip(repeated, known, strict=False) if one["role"] == "assistant")
    return sum(bool(thought := _thought(one)) and thought == _thought(other) for one, other in pairs)


def same_value(one: Any, other: Any) -> bool:
    """True if two plain values are the same JSON. Unlike in Python, `True` differs from 1. 1.0 is the same as 1."""
    return bool(one == other) and _same_kinds(one, other)


def _same_kinds(one: Any, other: Any) -> bool:
    """True if two values that Python takes for equal have booleans at the same places."""
    if one is other:
        return True
    match one:
        case dict():
            return all(_same_kinds(inner, other[name]) for name, inner in one.items())
        case list() | tuple():
            return all(map(_same_kinds, one, other))
    return isinstance(one, bool) == isinstance(other, bool)


def texts_of(turn: Message) -> tuple[str, ...]:
    """The texts of a turn of the policy without its thought: the whole text, and the text before a list of calls. Turns
    without a text in common are not the same."""
    if not _is_text(turn):
        return ()
    said = _said(turn)
    return (said, said.rpartition(_LISTED)[0].strip()) if _LISTED in said else (said,)


def _is_text(turn: Message) -> bool:
    """True if the content is a text or is missing. Rows of data may have lists of blocks instead."""
    return isinstance(turn.get("content") or "", str)


def _said(turn: Message) -> str:
    return split_thought(turn.get("content") or "")[1].strip()


def _thought(turn: Message) -> str:
    written = split_thought(turn.get("content") or "")[0] if _is_text(turn) else ""
    return (turn.get("reasoning_content") or written).strip()


def _calls(turn: Message) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in turn.get("tool_calls", ())]


def _lists(said: str, known_said: str, known_made: list[tuple[str, Any]]) -> bool:
    """True if `said` is the policy's text `known_said`, followed by its calls `known_made` as text.

    If the policy made no calls, any list of calls of `python_interpreter` is accepted.
    """
    before, mark, text = said.rpartition(_LISTED)
    if not mark or before.strip() != known_said or len(text) > _LONGEST_LIST:
        return False
    try:
        listed = [(call["function"]["name"], call["function"]["arguments"]) for call in ast.literal_eval(text)]
        if not known_made:
            return all(name == _CODE for name, _ in listed)
        # smolagents sorts the calls by their ids, which are random.
        return sorted(map(json.dumps, listed)) == sorted(map(json.dumps, known_made))
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        return False
