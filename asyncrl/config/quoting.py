"""Writes values as words of the command line, quoted for Hydra. `list_word` quotes for the shell, too."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from asyncrl.config.imports import path_of
from asyncrl.errors import ConfigError

NAME = re.compile(r"--[\w-]+")
"""An item that Hydra reads without quotes."""
IN_DOUBLE_QUOTES = re.compile(r'[^"$`\\!\n]*')
"""A word that needs no escapes within a shell's double quotes."""
ESCAPED_IN_NAMES = re.compile(r"[\\()\[\]{}:=, \t]")
"""A character that Hydra reads after a backslash in the name of a mapping's value."""


def quoted(value: object) -> str:
    """A value of any characters, quoted for a KEY=VALUE word."""
    if isinstance(value, int):
        return str(value)
    # Hydra takes a backslash as a plain character unless a quote follows.
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", str(value)).replace("'", "\\'")
    return f"'{escaped}'"


def as_word(key: str, value: object) -> str:
    """A value of Python as the word `KEY=VALUE` of the command line. Mappings and lists may nest.

    A function or a class becomes its dotted path. Raises ConfigError: the processes of a run cannot import it, or Hydra
    cannot read the name of a mapping's value.
    """
    return f"{key}={_nested(value, key)}"


def _nested(value: object, key: str) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_name(name, key)}: {_nested(each, key)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_nested(each, key) for each in value) + "]"
    return quoted(path_of(value, key) if callable(value) else value)


def _name(name: object, key: str) -> str:
    escaped = ESCAPED_IN_NAMES.sub(r"\\\g<0>", str(name))
    with suppress(HydraException):
        # Hydra reads some names as other values: 123 as a number, true as a truth value.
        read: object = OverridesParser.create().parse_override(f"key={{{escaped}: 0}}").value()
        if read == {name: 0}:
            return escaped
    raise ConfigError(
        f"{key}: the name {name!r:.100} cannot be written as a word of the command line; give it in a file "
        "(experiment=FILE.yaml)"
    )


def list_word(key: str, items: Sequence[str]) -> str:
    """The word `KEY=[...]`, quoted for a shell."""
    word = f"{key}=[{','.join(each if NAME.fullmatch(each) else quoted(each) for each in items)}]"
    return f'"{word}"' if IN_DOUBLE_QUOTES.fullmatch(word) else shlex.quote(word)
