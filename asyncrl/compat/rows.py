"""The type `Row` of the tables that translate keys of other trainers, and functions that make rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

Setting = tuple[str, Any]
"""One of asyncrl's keys, with its value."""
Translate = Callable[[Any], Iterator[Setting | str]]
"""A function that reads values of the other trainer's configuration by key. It yields settings, and a remark for each
value that has no exact counterpart."""


@dataclass(frozen=True)
class Row:
    """Keys of another trainer and their counterpart in asyncrl.

    - `there`: keys of that trainer. A key that ends in `.*` means all keys of its section that no other row has
    - `here`: our keys; empty if there is no counterpart
    - `sentence`: the translation in words, or what to use instead
    - `translate`: makes our settings; None if another row's function reads these keys, or if this row makes no settings
    - `defaults`: that trainer's default values of the keys
    - `alias_of`: the newer name of this key; empty if its name is current
    """

    there: tuple[str, ...]
    here: str
    sentence: str
    translate: Translate | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    alias_of: str = ""

    @property
    def is_without(self) -> bool:
        """True if the keys have no counterpart."""
        return not self.here and self.translate is None and not self.defaults


def same(there: str, here: str, default: Any, sentence: str = "The same value.") -> Row:
    """A row whose value is copied; null leaves asyncrl's default."""

    def copy(source: Any) -> Iterator[Setting | str]:
        if source[there] is not None:
            yield here, source[there]

    return Row((there,), here, sentence, copy, {there: default})


def made(there: str, here: str, default: Any, sentence: str, translate: Translate) -> Row:
    """A row whose settings `translate` makes. It may also read keys of other rows."""
    return Row((there,), here, sentence, translate, {there: default})


def used(there: str, here: str, default: Any, sentence: str) -> Row:
    """A row for a key that the function of another row reads."""
    return Row((there,), here, sentence, None, {there: default})


def none(section: str, names: str, sentence: str) -> Row:
    """A row for keys without a counterpart. `names` are their names within `section`, separated by spaces. An empty
    `section` means that the keys are in no section."""
    return Row(tuple(f"{section}.{name}" if section else name for name in names.split()), "", sentence)


def alias(there: str, new: str) -> Row:
    """A row for an older name of a key."""
    return Row((there,), f"as `{new}`", "", alias_of=new)


def part(name: str, **params: Any) -> dict[str, Any]:
    """The setting of a loss, an advantage or another part of the algorithm."""
    return {"name": name, "params": params} if params else {"name": name}


def dotted(path: str, name: str) -> str:
    """The path by which asyncrl finds the object `name` of the file or module `path`.

    It is FILE.py:NAME if `path` is absolute, or if a folder or the file has a name that no module can have. Otherwise
    it is dotted, and the file must be in the working directory or in PYTHONPATH.
    """
    if path.startswith("pkg://"):
        return f"{path.removeprefix('pkg://').replace('/', '.')}.{name}"
    file = PurePath(at_home(path.removeprefix("file://")))
    parts = tuple(part for part in file.with_suffix("").parts if part != ".")
    if file.is_absolute() or (not all(part.isidentifier() for part in parts) and file.suffix == ".py"):
        return f"{file}:{name}"
    return ".".join([*parts, name])


def in_file(path: str, name: str) -> str:
    """The path of the object `name`: FILE.py:NAME for a file, and the dotted path for a module."""
    file = path.removeprefix("file://")
    return f"{at_home(file)}:{name}" if file.endswith(".py") else dotted(path, name)


def at_home(path: str) -> str:
    """The path with `~` replaced by the home folder."""
    return str(Path(path).expanduser()) if path.startswith("~") else path
