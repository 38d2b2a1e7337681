"""Reads demonstrations from files: conversations whose assistant turns the policy learns.

Columns: `messages` (a chat with tool calls and results, as messages or as their JSON text), or `prompt` (messages,
their JSON text, or plain text) and `response` (text). With `prompt` and `response`, only the response is learned.
Optional: `tools` (OpenAI schemas, as structs or as JSON text). The supported files are listed in `asyncrl.data.tables`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from asyncrl.data.json_rows import JSON_SUFFIXES, json_rows
from asyncrl.data.rows import TableFile
from asyncrl.data.sendable import check_sendable, message_of, parse_json, schemas
from asyncrl.data.tables import find_files, read_rows, schema_of
from asyncrl.errors import DataError, WireError

COLUMNS = ("messages", "prompt", "response", "tools")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation, and the schemas of its tools (empty: no tools).

    `context` is the number of leading messages from which nothing is learned, even if they are assistant turns.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    context: int = 0


def check_columns(sources: Sequence[str | Path]) -> None:
    """Raises DataError: the files have no columns of demonstrations, or cannot be read. Of a JSON file, only the first
    row is read, unless it lacks the columns."""
    if not _are_enough(_first_columns(sources)):
        DemonstrationFile(sources)


def _are_enough(columns: Collection[str]) -> bool:
    return "messages" in columns or {"prompt", "response"} <= {*columns}


def _first_columns(sources: Sequence[str | Path]) -> set[str]:
    """The columns of all files. For a JSON file, only the columns of its first row count."""
    found: set[str] = set()
    for path in (path for source in sources for path in find_files(str(source))):
        found.update(next(json_rows(path)) if path.suffix in JSON_SUFFIXES else schema_of(path).names)
    return found


class DemonstrationFile(Sequence[Demonstration]):
    """The demonstrations in one or several files. Rows are read on demand.

    Raises DataError, which names the file, column or row that cannot be used. A bad row raises the error only when it
    is read.
    """

    def __init__(self, sources: Sequence[str | Path]) -> None:
        self._name = ", ".join(map(str, sources))
        self._rows = read_rows(sources, (), COLUMNS)
        if not _are_enough(self._rows.columns):
            raise DataError(
                f"{self._name}: demonstrations need a column messages, or the columns prompt and response; it has "
                f"{', '.join(sorted(_first_columns(sources)))}. For demonstrations in a column of a task file, use "
                "`asyncrl train` with data.demonstration=COLUMN"
            )
        if not len(self._rows):
            raise DataError(f"{self._name} has no rows; each row is a demonstration")

    @property
    def files(self) -> Sequence[TableFile]:
        """The files of the demonstrations."""
        return self._rows.files

    @property
    def column(self) -> str:
        """The name of the column that has the assistant turns."""
        return "messages" if "messages" in self._rows.columns else "response"

    def place(self, row: int) -> str:
        """The position of a demonstration as text, such as `a.jsonl: line 3`."""
        return self._rows.file_of(row).place(row)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> Demonstration: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Demonstration]: ...
    def __getitem__(self, row: int | slice) -> Demonstration | Sequence[Demonstration]:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        if not 0 <= row < len(self):
            raise IndexError(row)
        column = "?"
        try:
            values = self._rows.values(row)
            column = "tools"
            tools = _tools(values.get("tools"))
            if self.column == "messages":
                column = "messages"
                return Demonstration(_messages(values.get("messages")), tools)
            column = "prompt"
            prompt = _prompt(values.get("prompt"))
            column = "response"
            response = {"role": "assistant", "content": _text(values.get("response"))}
            return Demonstration([*prompt, response], tools, context=len(prompt))
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{self.place(row)}, column {column}: {error}; mend or drop the row") from error


def read_continuation(value: Any) -> Sequence[Mapping[str, Any]]:
    """The messages that a demonstration adds to a task's prompt; empty for null. Raises ValueError.

    `value` is a list of messages, JSON text of messages, or the plain text of one answer.
    """
    if value is None:
        return ()
    if value == "":
        raise ValueError("it is empty text; use null if there is no demonstration")
    if isinstance(value, str) and not _is_json(value):
        return ({"role": "assistant", "content": value},)
    found = _messages(value)
    if all(message["role"] != "assistant" for message in found):
        raise ValueError("it has no assistant turn to learn")
    return found


def _messages(value: Any) -> list[Mapping[str, Any]]:
    """The messages in a list or in JSON text. Raises ValueError."""
    try:
        found = parse_json(value) if isinstance(value, str) else value
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not isinstance(found, list) or not found:
        raise ValueError("there are no messages")
    if not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in found):
        raise ValueError("each message must have a role and a content")
    messages: list[Mapping[str, Any]] = [message_of(each) for each in found]
    try:
        # JSON may contain a text with half of a surrogate pair, and tokenizers refuse such a text.
        check_sendable(messages)
    except WireError as error:
        raise ValueError(str(error)) from error
    return messages


def _prompt(value: Any) -> list[Mapping[str, Any]]:
    """The messages of a prompt, which may be plain text. Raises ValueError."""
    if isinstance(value, str) and not _is_json(value):
        return [{"role": "user", "content": value}]
    return _messages(value)


def _is_json(text: str) -> bool:
    """True if a text is JSON of messages, not plain text."""
    return text.lstrip().startswith("[{")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"it must be text, not {value!r:.100}")
    return value


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """The schemas of tools. Raises ValueError: the value is neither schemas nor JSON text."""
    if isinstance(value, str):
        return tuple(schemas(value))
    return tuple(schema for tool in value or () for schema in schemas(tool))
