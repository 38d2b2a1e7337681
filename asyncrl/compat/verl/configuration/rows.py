"""The rows of the table that translates verl's keys, and the functions that make rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from asyncrl.compat.verl.configuration.source import VerlConfig

Setting = tuple[str, Any]
"""A key of ours with its value."""
Translate = Callable[[VerlConfig], Iterator[Setting | str]]
"""Gives settings, and a remark for each value that has no exact counterpart."""


@dataclass(frozen=True)
class Row:
    """Keys of verl and their counterpart. `there` are keys of verl, `defaults` their values in verl.

    A key that ends in `.*` means all keys of its section that no other row has. `here` are our keys, empty without a
    counterpart; `sentence` then says what to use instead. A row without `translate` is read together with another one.
    `alias_of`: the key of which this one is an older name.
    """

    there: tuple[str, ...]
    here: str
    sentence: str
    translate: Translate | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    alias_of: str = ""


def same(there: str, here: str, default: Any, sentence: str = "The same.") -> Row:
    """A row whose value is kept; null leaves our default."""

    def copy(source: VerlConfig) -> Iterator[Setting | str]:
        if source[there] is not None:
            yield here, source[there]

    return Row((there,), here, sentence, copy, {there: default})


def made(there: str, here: str, default: Any, sentence: str, translate: Translate) -> Row:
    """A row whose settings a function makes, maybe from several keys."""
    return Row((there,), here, sentence, translate, {there: default})


def used(there: str, here: str, default: Any, sentence: str) -> Row:
    """A row that the function of another row reads."""
    return Row((there,), here, sentence, None, {there: default})


def none(section: str, names: str, sentence: str) -> Row:
    """A row of the named keys of a section, which have no counterpart."""
    return Row(tuple(f"{section}.{name}" if section else name for name in names.split()), "", sentence)


def alias(there: str, new: str) -> Row:
    """A row for an older name of a key."""
    return Row((there,), f"as `{new}`", "", alias_of=new)


def dotted(path: str, name: str) -> str:
    """The dotted path of an object that verl finds by a file and a name."""
    if path.startswith("pkg://"):
        return f"{path.removeprefix('pkg://')}.{name}"
    file = PurePath(path)
    parts = file.with_suffix("").parts
    if file.suffix == ".py":
        # A module is found from the folder of the start, or else by PYTHONPATH.
        parts = parts[-1:] if file.is_absolute() or ".." in parts else tuple(part for part in parts if part != ".")
    return ".".join([*parts, name])


def at_home(path: str) -> str:
    """The path with `~` as the home folder."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def found_from(path: str) -> str:
    """The folder where a file of Python must be found, for a remark; empty if it is the start's folder."""
    file = PurePath(path)
    if file.suffix == ".py" and (file.is_absolute() or ".." in file.parts):
        return f"start asyncrl in {file.parent}, or put this folder into PYTHONPATH"
    return ""
