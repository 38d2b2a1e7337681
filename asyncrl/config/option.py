"""The declaration of an option: its default, its meaning and its constraint.

The sections of the configuration and the parts of algorithms declare their fields with `option`.
"""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal

Secret = Literal["all", "named", "none"]
REQUIRED = "???"
"""The default of a configuration key that the user must set. OmegaConf uses the same mark."""

_WORDS = {bool: "true or false", str: "text", Any: "anything", float: "number", int: "whole number"}


def option(
    default: Any,
    meaning: str,
    within: str = "",
    choices: Sequence[str] = (),
    fixed: str = "",
    secret: Secret | None = None,
) -> Any:
    """A dataclass field.

    - `default`: `...` if the caller must give a value. Each instance gets its own copy of a list, a mapping or a part.
    - `within`: an interval such as "(0, inf]". It applies to each value of a list or mapping.
    - `choices`: the allowed texts, also for each value of a list or mapping.
    - `fixed`: the reason why a resumed run must keep the value. If it is empty, the value may change.
    - `secret`: which values are masked (`config/secrets.py`). `all`, `none`: all or no values. `named`: only the
      entries of a mapping whose names look like a secret's. `None` means `named`. An option whose own name looks like a
      secret's must set `secret`.
    """
    metadata = {
        "meaning": meaning,
        "within": within,
        "choices": tuple(choices),
        "fixed": fixed,
        "secret": secret,
    }
    if default is ...:
        return field(metadata=metadata)
    if type(default).__hash__ is None:
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Option:
    """One declared option. `type` is the type without None, and `optional` tells whether None is allowed."""

    name: str
    type: Any
    optional: bool
    default: Any
    meaning: str
    within: str
    choices: tuple[str, ...]
    fixed: str
    secret: Secret | None

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def allowed(self) -> str:
        """The allowed values in words, such as "a number in (0, inf) or null"."""
        return self._words(self.type) + (" or null" if self.optional else "")

    @property
    def holds_anything(self) -> bool:
        """True if its value can contain anything, such as a mapping with arbitrary keys."""
        return Any in (self.type, *typing.get_args(self.type))

    @property
    def holds_texts(self) -> bool:
        """True if its value can be or contain a text."""
        hint = self.type
        while typing.get_args(hint):
            hint = typing.get_args(hint)[-1]
        return hint not in (bool, int, float)

    def allows(self, value: Any) -> bool:
        """True if a value has the type and meets the constraint."""
        return self.optional if value is None else value != "" and self._fits(value, self.type)

    def _words(self, hint: Any, plural: bool = False) -> str:
        article, end = ("", "s") if plural else ("a ", "")
        if typing.get_origin(hint) in (list, dict):
            container = f"list{end} of" if typing.get_origin(hint) is list else f"mapping{end} to"
            return f"{article}{container} {self._words(typing.get_args(hint)[-1], plural=True)}"
        if self.choices:
            return ("" if plural else "one of ") + ", ".join(self.choices)
        if hint in (float, int):
            return f"{article}{_WORDS[hint]}{end}" + (f" in {self.within}" if self.within else "")
        return _WORDS.get(hint, f"{article}part{end}: NAME, or {{name: NAME, params: {{...}}}}")

    def _fits(self, value: Any, hint: Any) -> bool:
        origin, each = typing.get_origin(hint), typing.get_args(hint)[-1:]
        if origin is list:
            return isinstance(value, list) and all(self._fits(one, *each) for one in value)
        if origin is dict:
            return isinstance(value, Mapping) and all(self._fits(one, *each) for one in value.values())
        if hint in (float, int):
            return _is_number(value, hint) and _inside(float(value), self.within or "(-inf, inf)")
        return hint is Any or (isinstance(value, hint) and (not self.choices or value in self.choices))


def options(cls: type[Any]) -> tuple[Option, ...]:
    """The options that a dataclass declares, in order."""
    return _options(typing.cast(Hashable, cls))


@cache
def _options(cls: Any) -> tuple[Option, ...]:
    hints = typing.get_type_hints(cls)
    return tuple(_option(declared, hints[declared.name]) for declared in fields(cls) if declared.metadata)


def _option(declared: Field[Any], hint: Any) -> Option:
    of_several = isinstance(hint, types.UnionType)
    optional = of_several or hint is Any
    if of_several:
        hint = next(each for each in typing.get_args(hint) if each is not types.NoneType)
    factory = declared.default_factory
    default = declared.default if factory is MISSING else factory()
    return Option(declared.name, hint, optional, default, **declared.metadata)


def summary(section: type[Any]) -> str:
    """Return the first paragraph of a section's docstring in one line."""
    return " ".join((section.__doc__ or "").strip().partition("\n\n")[0].split())


def as_yaml(value: Any) -> str:
    """A value as the command line and YAML files write it."""
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case list():
            return f"[{', '.join(as_yaml(each) for each in value)}]"
        case dict():
            return f"{{{', '.join(f'{name}: {as_yaml(each)}' for name, each in value.items())}}}"
        case _ if is_dataclass(value):
            return as_yaml({name: each for name, each in vars(value).items() if each != {}})
    return str(value)


def part_text(choice: Any) -> str:
    """The name and parameters of a part of the algorithm (a mapping), or of each part in a list, as text."""
    if isinstance(choice, list):
        return ", ".join(map(part_text, choice)) or "none"
    params = ", ".join(f"{name}={as_yaml(value)}" for name, value in choice.get("params", {}).items())
    return f"{choice['name']} ({params})" if params else str(choice["name"])


def _is_number(value: Any, wanted: type) -> bool:
    types_taken = (int, float) if wanted is float else (int,)
    return isinstance(value, types_taken) and not isinstance(value, bool) and value == value


def _inside(value: float, interval: str) -> bool:
    low, high = (float(edge) for edge in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below
