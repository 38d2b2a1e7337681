"""Writes values as words of the command line, quoted for Hydra. `list_word` quotes for the shell, too."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from asyncrl.config.imports import path_of

NAME = re.compile(r"--[\w-]+")
"""An item that Hydra reads without quotes."""
IN_DOUBLE_QUOTES = re.compile(r'[^"$`\\!\n]*')
"""A word that needs no escapes within a shell's double quotes."""


def quoted(value: object) -> str:
    """A value of any characters, quoted for a KEY=VALUE word."""
    if isinstance(value, int):
        return str(value)
    # Hydra takes a backslash as a plain character unless a quote follows.
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", str(value)).replace("'", "\\'")
    return f"'{escaped}'"


def as_word(key: str, value: object) -> str:
    """A value of Python as the word `KEY=VALUE` of the command line. Mappings and lists may nest.

    A function or a class becomes its dotted path. Raises ConfigError: the processes of a run cannot import it.
    """
    return f"{key}={_nested(value, key)}"


def _nested(value: object, key: str) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_nested(each, key)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_nested(each, key) for each in value) + "]"
    return quoted(path_of(value, key) if callable(value) else value)


def list_word(key: str, items: Sequence[str]) -> str:
    """The word `KEY=[...]`, quoted for a shell."""
    word = f"{key}=[{','.join(each if NAME.fullmatch(each) else quoted(each) for each in items)}]"
    return f'"{word}"' if IN_DOUBLE_QUOTES.fullmatch(word) else shlex.quote(word)
