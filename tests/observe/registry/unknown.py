"""The names of metrics that the registry lacks."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from asyncrl.observe.registry import BY_WRITER, describe

ANY = "*"
"""The mark in place of a part of a name that is computed."""


def unknown(writer: str, names: Iterable[str]) -> list[str]:
    """Return the names that a writer's files may not have, since the registry does not describe them.

    A name with a computed part is known if a metric has the rest of it.
    """
    known = [metric.name for metric in BY_WRITER.get(writer, ())]
    return [
        name
        for name in names
        if describe(writer, name) is None and not (ANY in name and any(fnmatchcase(each, name) for each in known))
    ]
