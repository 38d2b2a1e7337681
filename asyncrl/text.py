"""Makes text from tools, agents, exceptions and the network safe to send, store and log."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.masking import masked_text


def encodable(value: Any) -> Any:
    """The plain value with text that UTF-8 can encode: half of a surrogate pair becomes a question mark.

    Raises RecursionError: the value is nested deeper than Python's stack.
    """
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {encodable(name): encodable(inner) for name, inner in value.items()}
        case list() | tuple():
            return [encodable(inner) for inner in value]
    return value


def json_text(value: Any) -> str:
    """The value as indented JSON. Numbers that are not finite become null, which every JSON parser can read."""
    return msgspec.json.format(msgspec.json.encode(encodable(value)), indent=2).decode()


def nested_within(value: Any, levels: int) -> bool:
    """True if lists and objects of a plain value are nested at most `levels` deep."""
    inner = [value]
    for _ in range(levels + 1):
        containers = (
            each.values() if isinstance(each, dict) else each for each in inner if isinstance(each, dict | list)
        )
        inner = [each for container in containers for each in container]
        if not inner:
            return True
    return False


def count_characters(value: Any) -> int:
    """The number of characters of all texts in a plain value."""
    match value:
        case str():
            return len(value)
        case dict():
            return sum(map(count_characters, value)) + sum(map(count_characters, value.values()))
        case list() | tuple():
            return sum(map(count_characters, value))
    return 0


def cut(text: str, max_chars: int) -> str:
    """Cut out the middle of a text to keep `max_chars` characters. Error messages are usually at the end of a text."""
    if len(text) > max_chars:
        head = max_chars - max_chars // 2
        text = f"{text[:head]}\n[{len(text) - max_chars} characters cut]\n{text[len(text) - max_chars // 2 :]}"
    return str(encodable(text))


def reason_of(error: BaseException) -> str:
    """The type and message of an exception, with secrets masked. Never raises, even if `__str__` does."""
    try:
        return masked_text(f"{type(error).__name__}: {error}")
    except Exception as second:  # noqa: BLE001 - reported as part of the reason
        return f"{type(error).__name__}, whose message cannot be read ({type(second).__name__})"


def duration(seconds: float) -> str:
    """A duration as text: "40 s", "12 min" or "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
