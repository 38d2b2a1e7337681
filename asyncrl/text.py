"""Makes text from tools, agents, exceptions and the network safe to send, store and log."""

from __future__ import annotations

import inspect
import os
import re
import sysconfig
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.masking import masked_text

_VARIES = re.compile(r"(?<!line )(?<!\d)\d+|'[^']*'|\"[^\"]*\"")
"""Matches the numbers and quoted values of a reason, such as an id or a missing key, but not the number of a line of
code."""
_LINE = re.compile(r"\([^()]+, line \d+\)")
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)
"""A line of a stack, as faulthandler writes it."""
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_OWN = (f"{Path(__file__).parent}{os.sep}", *_LIBRARIES, "<frozen", "<string>")
"""A file whose name begins with one of these is not the user's: it belongs to asyncrl, Python or an installed
package."""


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


def shortened(text: str, max_chars: int) -> str:
    """The text as one line of at most `max_chars` characters: line breaks become spaces, and the end is cut off."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else f"{line[: max_chars - 3]}..."


def printable(text: str) -> str:
    """Text without effect on a terminal: a policy, a tool or a worker may have written escape sequences."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)


def reason_of(error: BaseException) -> str:
    """The type and message of an exception, and the line of the user's code that raised it, with secrets masked. Never
    raises."""
    line, (first, newline, rest) = own_line(error), message_of(error).partition("\n")
    # The message may quote the reason of another error, which names the same line.
    is_new = line and f"({line})" not in first
    return f"{first} ({line}){newline}{rest}" if is_new else f"{first}{newline}{rest}"


def message_of(error: BaseException) -> str:
    """The type and message of an exception, with secrets masked. Says so if `__str__` raises an Exception."""
    try:
        return masked_text(f"{type(error).__name__}: {error}")
    except Exception as second:  # noqa: BLE001 - reported as part of the reason
        return f"{type(error).__name__}, whose message cannot be read ({type(second).__name__})"


def short_repr(value: Any) -> str:
    """The first 100 characters of the representation of a user's value. If `__repr__` raises an Exception, the result
    says so. Anything else that it raises, such as SystemExit, is not caught."""
    try:
        return f"{value!r:.100}"
    except Exception as error:  # noqa: BLE001 - reported. It may be a whole number of more than 4,300 digits.
        return f"a value of type {type(value).__name__} that cannot be shown ({message_of(error)})"


def own_line(error: BaseException) -> str:
    """The innermost line of the user's own code in the traceback of an error, such as `my_tools.py, line 12`.

    If the error's own traceback has no file of the user, the traceback of the error's cause is searched. Empty if
    neither has such a file.
    """
    if isinstance(error, SyntaxError) and error.filename:
        places = [(error.filename, error.lineno)]
    else:
        places = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    own = [(file, number) for file, number in places if is_own(file)]
    if own:
        return line_of(*own[-1])
    return own_line(error.__cause__) if error.__cause__ is not None else ""


def line_in_stacks(stacks: str) -> str:
    """The innermost line of the user's own code in the stacks of threads, as faulthandler writes them.

    Empty if the stacks have no such line. If several threads run the user's code, the result is of the first one.
    """
    own = (line_of(file, int(number)) for file, number in _FRAME.findall(stacks) if is_own(file))
    return next(own, "")


def kind_of(reason: str) -> str:
    """The reason with `#` in place of each number and quoted value, so that failures of one kind have the same text."""
    return _VARIES.sub("#", reason)


def names_own_line(reason: str) -> bool:
    """True if `reason_of` found a line of the user's own code for this reason."""
    return _LINE.search(reason) is not None


def is_own(file: str) -> bool:
    """True if the source file is a user's: it belongs neither to asyncrl nor to Python or an installed package."""
    return not file.startswith(_NOT_OWN) and "dist-packages" not in file


def line_of(file: str, number: int | None) -> str:
    """A line of a file as messages name it. The path is relative if the file is in the working directory."""
    with suppress(OSError, ValueError):  # The working directory may have been removed.
        file = str(Path(file).relative_to(Path.cwd()))
    return f"{file}, line {number}"


def line_of_function(function: Any) -> str:
    """The line that defines a function or the class of a callable object, such as `my_rewards.py, line 12`. Empty if it
    has no code in Python."""
    function = inspect.unwrap(getattr(function, "func", function))  # The function of a `functools.partial`.
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return "" if code is None else line_of(code.co_filename, code.co_firstlineno)


def duration(seconds: float) -> str:
    """A duration as text: "40 s", "12 min" or "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
