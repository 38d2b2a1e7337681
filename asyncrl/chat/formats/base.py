"""The base of all formats of tool calls.

A format finds the calls in the text of an assistant turn, and writes calls as text. `asyncrl.chat.parsing` checks the
names and arguments of the calls that it finds.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from asyncrl.chat.formats.schemas import ANY, admits, kinds_of, lists, parameters_of

Functions = Mapping[str, Mapping[str, Any]]
"""Maps the name of each tool on offer to its OpenAI function object."""

_SPACE = re.compile(r"\s*")
_MAX_DEPTH = 32
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "none": None}
_NULLS = ("null", "None")


class WrittenCall(NamedTuple):
    """A call as the policy wrote it. `id` is empty if the format has no ids, or the policy wrote no id."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


class CallError(ValueError):
    """The policy began a call that cannot be read. `name` and `id` are set if they were read before the fault.

    `arguments` are set if the policy wrote a JSON value that is not an object.
    """

    def __init__(self, reason: str, name: str = "unknown", id: str = "", arguments: Any = None) -> None:
        super().__init__(reason)
        self.name = name
        self.id = id
        self.arguments = arguments


class Format(ABC):
    """The format in which a family of models writes tool calls.

    - `mark` is a pattern. It matches where calls begin, and where a thought begins or ends. Where a thought begins or
      ends, its group `thought` matches. Where a thought begins, its group `opened` matches, too. The pattern never
      matches an empty text.
    - `stop_tokens` end a turn, in addition to the end tokens in the template.
    - With `reasoning_apart` the chat template expects reasoning in a separate field, not in the content.
    - With `text_after_calls` the policy's text after its calls is content, too.
    """

    name: ClassVar[str]
    mark: ClassVar[re.Pattern[str]]
    stop_tokens: ClassVar[tuple[str, ...]] = ()
    reasoning_apart: ClassVar[bool] = False
    text_after_calls: ClassVar[bool] = False

    @abstractmethod
    def read(self, mark: re.Match[str], functions: Functions) -> tuple[Sequence[WrittenCall | CallError], int]:
        """Read the calls that begin at `mark`; return them and the position after them.

        Raises CallError: no call can be read. The caller then searches for calls after the mark.
        """

    @abstractmethod
    def write(self, calls: Sequence[WrittenCall]) -> str:
        """Write the calls of one turn as the family's chat template does."""

    def split(self, text: str) -> tuple[str, str]:
        """Split a turn into reasoning and content. Without `reasoning_apart` the reasoning is empty."""
        return "", text

    def join(self, reasoning: str, content: str) -> str:
        """Join reasoning and content into a turn: the reverse of `split`."""
        return content


def closed(opening: str, thought: str = "<think>", thought_end: str = "</think>") -> re.Pattern[str]:
    """The mark of a format whose calls begin with the pattern `opening`.

    A thought begins at the start of the turn or after another thought. Anywhere else, `thought` is ordinary text.
    """
    return re.compile(rf"{opening}|(?P<thought>(?:\A|{thought_end})\s*+(?P<opened>{thought})|{thought_end})")


def read_json(text: str, start: int) -> tuple[Any, int]:
    """Read the JSON value at `start`, after blanks; return it and the position after it.

    Raises CallError: there is no JSON value, or it cannot be sent and stored.
    """
    try:
        value, end = _decoder.raw_decode(text, skip_space(text, start))
        _check_plain(value)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise CallError(f"the tool call is not valid JSON: {reason}") from None
    return value, end


def read_arguments(text: str, start: int) -> tuple[dict[str, Any], int]:
    """Read the JSON object with the arguments of a call, as `read_json` does."""
    arguments, end = read_json(text, start)
    if not isinstance(arguments, dict):
        raise CallError("the arguments of a tool call must be a JSON object")
    return arguments, end


def read_until(text: str, start: int, closing: str, what: str, barred: Sequence[str] = ()) -> tuple[str, int]:
    """Read the text from `start` to `closing`; return it and the position after `closing`.

    Raises CallError: there is no `closing`, or one of the marks `barred` comes before it.
    """
    end = text.find(closing, start)
    if end < 0 or any(text.find(mark, start, end) >= 0 for mark in barred):
        raise CallError(f"{closing} must follow {what}")
    return text[start:end], end + len(closing)


def expect(text: str, start: int, token: str, what: str) -> int:
    """The position after `token`, which must be at `start`, or after blanks there. Raises CallError: `token` is
    missing."""
    begin = skip_space(text, start)
    if not text.startswith(token, begin):
        raise CallError(f"{token} must follow {what}")
    return begin + len(token)


def skip_space(text: str, start: int) -> int:
    """The position of the first character from `start` that is not blank."""
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]


def to_json(value: Any) -> str:
    """Write JSON as most chat templates do."""
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    """Write an argument: a text unchanged, any other value as JSON."""
    return value if isinstance(value, str) else to_json(value)


def from_text(text: str, name: str, key: str, functions: Functions) -> Any:
    """The value of argument `key` of tool `name`, in a format that writes texts unchanged and other values as JSON.

    The tool's schema decides (`schemas`):

    - If it names the type string, the value is `text` itself. There is one exception: the schema lists values and does
      not admit `text`, but admits its JSON value. Then the value is the JSON value.
    - If it names the types string and null, `null` and `None` are null, and other spellings such as `NULL` are texts.
    - Otherwise `text` is read as JSON, or as Python's True, False or None. A text that is none of these stays a text.
      The later check of the arguments refuses it if the schema names a type.

    Raises CallError: the value cannot be sent.
    """
    function = functions.get(name, {})
    properties = parameters_of(function).get("properties")
    schema = properties.get(key, {}) if isinstance(properties, Mapping) else {}
    value = _reading(text, schema, function)
    try:
        _check_plain(value)
    except ValueError as error:
        raise CallError(f"argument {key!r:.80} cannot be sent: {error}", name) from None
    return value


def _reading(text: str, schema: Any, function: Mapping[str, Any]) -> Any:
    kinds, word = kinds_of(schema, function), text.strip()
    takes_text = kinds != ANY and "string" in kinds
    if takes_text and lists(schema, text, function):
        return text
    if takes_text and "null" in kinds and word in _NULLS:
        return None
    if takes_text and admits(schema, text, function):
        return text
    value = _literal(text)
    return text if takes_text and not admits(schema, value, function) else value


def _literal(text: str) -> Any:
    """The value of a JSON text or of a word in `_WORDS`. Any other text stays a text."""
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        value, end = read_json(text, 0)
    except CallError:
        return text
    return text if text[end:].strip() else value


def _check_plain(value: Any, depth: int = 0) -> None:
    """Raises ValueError: msgpack or UTF-8 cannot carry the value, although it was read as JSON."""
    match value:
        case dict() | list():
            if depth == _MAX_DEPTH:
                raise ValueError("nested too deeply")
            for item in value:
                _check_plain(item, depth + 1)
            if isinstance(value, dict):
                _check_plain(list(value.values()), depth)
        case str():
            if value.isascii():
                return
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("half of a surrogate pair") from None
        case int() if not -(2**63) <= value < 2**63:
            raise ValueError("an integer has more than 64 bits")
        case float() if not math.isfinite(value):
            raise ValueError("a number is too large")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_no_constant)
