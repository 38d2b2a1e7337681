"""Text of tools, agents, exceptions and strangers, made fit to be sent, stored and logged."""

from __future__ import annotations

from typing import Any


def encodable(value: Any) -> Any:
    """A plain value whose texts all have an encoding: half of a surrogate pair becomes a question mark.

    Raises RecursionError: it is nested deeper than Python's stack.
    """
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {encodable(name): encodable(inner) for name, inner in value.items()}
        case list() | tuple():
            return [encodable(inner) for inner in value]
    return value


def cut(text: str, max_chars: int) -> str:
    """At most `max_chars` of the text's own characters: its head and its tail, where errors tend to stand."""
    text = encodable(text)
    if len(text) <= max_chars:
        return text
    head = max_chars - max_chars // 2
    return f"{text[:head]}\n[{len(text) - max_chars} characters cut]\n{text[len(text) - max_chars // 2 :]}"


def reason_of(error: BaseException) -> str:
    """The type and the message of an exception, also of one that cannot tell its message."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as second:  # noqa: BLE001 - it is part of the reason
        return f"{type(error).__name__}, whose message cannot be had ({type(second).__name__})"
