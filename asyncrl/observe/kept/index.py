"""Encodes and reads `index.jsonl`, the index of all kept episodes. With it a table of 10^5 episodes opens at once.

The first line has the format, and an id that changes whenever the whole file is written. Each further line has the rows
of one step and the number of bytes of its file. Of several lines of one step, only the last one is valid. A line
without rows means that the step is no longer kept.

So the writer only appends, and a reader that looks again reads only new lines. Now and then the file is written again
without outdated lines, and with another id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import StoreError
from asyncrl.observe.kept.episode import KeptRow
from asyncrl.text import encodable

INDEX = "index.jsonl"
FORMAT = 1


class IndexLine(msgspec.Struct, frozen=True):
    """The entry of a step in the index."""

    step: int
    bytes: int
    rows: Sequence[KeptRow]


class _First(msgspec.Struct, frozen=True):
    format: int
    writing: str


_LINE, _FIRST = msgspec.json.Decoder(IndexLine), msgspec.json.Decoder(_First)


def encode_line(line: IndexLine) -> bytes:
    return _encoded(line)


def encode_index(writing: str, lines: Iterable[IndexLine]) -> bytes:
    """A whole index; `writing` is its id."""
    return b"".join([_encoded(_First(FORMAT, writing)), *map(_encoded, lines)])


def _encoded(value: Any) -> bytes:
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(encodable(msgspec.to_builtins(value)))
    if b":null" in encoded:
        # msgspec writes NaN and infinite rewards as null. The standard library keeps them, as in a run's metrics.
        encoded = json.dumps(encodable(msgspec.to_builtins(value))).encode()
    return encoded + b"\n"


def _decoded(line: bytes) -> IndexLine:
    """Decode a line. Raises ValueError or RecursionError: the line is malformed."""
    try:
        return _LINE.decode(line)
    except msgspec.MsgspecError:
        return msgspec.convert(json.loads(line), IndexLine)


class IndexReader:
    """Reads the index of `folder`, and later the lines added to it. A last line that is still being written is left
    out."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / INDEX
        self.steps: dict[int, IndexLine] = {}
        """The steps that are kept, with their lines, in any order."""
        self.dead_bytes = 0
        """Bytes of outdated lines."""
        self.size = 0
        """The number of bytes that were read. The last of them ends a line."""
        self._first = b""
        self._lengths: dict[int, int] = {}

    def refresh(self) -> bool:
        """Read the new lines. Return True if the index has changed, also if it was written again or deleted.

        Raises StoreError: a line is damaged, or the index has another format; OSError: the index cannot be read.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            changed = self.size > 0
            self._forget()
            return changed
        with file:
            first = file.readline()
            if not first.endswith(b"\n"):
                return False
            is_new = first != self._first
            if is_new:
                self._forget()
                self._begin(first)
            before = self.size
            file.seek(before)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._take(line)
        return is_new or self.size > before

    def _forget(self) -> None:
        self.steps, self._lengths, self._first, self.size, self.dead_bytes = {}, {}, b"", 0, 0

    def _begin(self, first: bytes) -> None:
        try:
            found = _FIRST.decode(first)
        except msgspec.MsgspecError as error:
            raise StoreError(f"{self.path} is damaged in its first line: {error}") from error
        if found.format != FORMAT:
            raise StoreError(f"{self.path} has format {found.format}, this version of asyncrl reads {FORMAT}")
        self._first, self.size = first, len(first)

    def _take(self, line: bytes) -> None:
        try:
            found = _decoded(line)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{self.path} is damaged at byte {self.size}: {error}") from error
        self.size += len(line)
        self.dead_bytes += self._lengths.pop(found.step, 0)
        self.steps.pop(found.step, None)
        if found.rows:
            self.steps[found.step], self._lengths[found.step] = found, len(line)
        else:
            self.dead_bytes += len(line)
