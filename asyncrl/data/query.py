"""Parses the sources of tasks that are not files: `KIND:NAME?KEY=VALUE&KEY=VALUE`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl

from asyncrl.errors import DataError


@dataclass(frozen=True)
class SourceQuery:
    """The name and the values of a source, with `%` and `+` decoded as in a URL."""

    name: str
    values: dict[str, str]

    @staticmethod
    def of(source: str, form: str) -> SourceQuery:
        """Read a source. Raises DataError, which shows the right `form`: the source has another form."""
        name, mark, rest = source.partition(":")[2].partition("?")
        try:
            pairs = parse_qsl(rest, keep_blank_values=True, strict_parsing=True) if mark else []
        except ValueError as error:
            raise DataError(f"{source}: {error}; write {form}") from error
        if not name or len(dict(pairs)) < len(pairs):
            raise DataError(f"{source}: write {form}, each key once")
        return SourceQuery(name, dict(pairs))
