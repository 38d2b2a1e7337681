"""Reads the script that replaces the policy of `asyncrl try`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.engine.scripted import Answer
from asyncrl.errors import DataError

FORM = '"TEXT" or {"content": "TEXT", "tool_calls": [{"name": "NAME", "arguments": {...}}]}'


def read_answers(path: Path) -> list[Answer]:
    """The answers of a script, one per line. Raises DataError, which names the line."""
    try:
        # splitlines would also divide lines at U+2028 and U+0085, which texts of JSON may contain.
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--answers={path} cannot be read: {error}") from error
    return [_answer(f"{path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _answer(place: str, line: str) -> Answer:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}; write {FORM}") from error
    match found:
        case str():
            return found
        case {"tool_calls": [*calls], **rest} if rest.keys() <= {"content"} and all(map(_is_call, calls)):
            return {"content": str(rest.get("content") or ""), "tool_calls": calls}
        case {"content": str(content), **rest} if not rest:
            return content
    raise DataError(f"{place} is not an answer; write {FORM}")


def _is_call(call: Any) -> bool:
    match call:
        case {"name": str(), "arguments": dict(), **rest}:
            return not rest
    return False
