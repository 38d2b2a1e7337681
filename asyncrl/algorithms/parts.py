"""What every choosable part is: a frozen dataclass of parameters, declared once with type, range and meaning.

The class docstring is the part's card, read by the command line and the documentation: a first sentence, then entries
`Formula:`, `Use:`, `Source:` and, where there is one, `Caveat:`.
"""

from __future__ import annotations

import re
import types
import typing
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Self

from asyncrl.errors import ConfigError

_TYPES = {float: "a number", int: "a whole number", bool: "true or false", str: "text", dict: "a mapping to numbers"}


def param(default: Any, meaning: str, within: str = "", choices: Sequence[str] = ()) -> Any:
    """A parameter: its default (`...` if it must be given), an interval such as "(0, inf]" or the allowed texts."""
    metadata = {"meaning": meaning, "within": within, "choices": tuple(choices)}
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Part(ABC):
    """Base of all parts. Subclasses are frozen, keyword-only dataclasses whose fields are made by `param`.

    Construction raises ConfigError: a parameter has a wrong type, lies outside its range, or conflicts with another.
    """

    kind: ClassVar[str]
    name: ClassVar[str]

    def __post_init__(self) -> None:
        for parameter in parameters(type(self)):
            value = getattr(self, parameter.name)
            if not parameter.allows(value):
                raise ConfigError(f"{self.told(parameter.name)}: it must be {parameter.allowed}")

    @classmethod
    def build(cls, params: Mapping[str, Any]) -> Self:
        """The part with these parameters. Raises ConfigError: one is unknown, missing, or not allowed."""
        known = {parameter.name: parameter for parameter in parameters(cls)}
        for name in params:
            if name not in known:
                raise ConfigError(
                    f"algorithm.{cls.kind} {cls.name} has no parameter {name!r}; it takes {', '.join(known) or 'none'}"
                )
        for name, parameter in known.items():
            if parameter.required and name not in params:
                raise ConfigError(f"algorithm.{cls.kind} {cls.name} needs {name}: {parameter.meaning}")
        return cls(**params)

    def told(self, parameter: str) -> str:
        """How a message names one parameter and its value."""
        return f"algorithm.{self.kind} {self.name}: {parameter}={getattr(self, parameter)!r}"


@dataclass(frozen=True)
class Parameter:
    """One parameter as declared."""

    name: str
    type: type
    optional: bool
    default: Any
    meaning: str
    within: str
    choices: tuple[str, ...]

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def allowed(self) -> str:
        """What a value must be, in words."""
        words = f"one of {', '.join(self.choices)}" if self.choices else _TYPES[self.type]
        words += f" in {self.within}" if self.within else ""
        return words + (" or null" if self.optional else "")

    def allows(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if self.type is dict:
            return isinstance(value, Mapping) and all(_is_number(each, float) for each in value.values())
        if self.type in (float, int):
            return _is_number(value, self.type) and _inside(float(value), self.within or "(-inf, inf)")
        return isinstance(value, self.type) and (not self.choices or value in self.choices)


def parameters(part: type[Part]) -> list[Parameter]:
    """The parameters of a part, in order."""
    hints = typing.get_type_hints(part)
    return [_parameter(declared, hints[declared.name]) for declared in fields(part)]


def card(part: type[Part]) -> dict[str, str]:
    """The entries of its docstring: `summary`, and `formula`, `use`, `source`, `caveat` where they are."""
    text = re.sub(r"\s+", " ", (part.__doc__ or "").strip())
    pieces = re.split(r" ?\b(Formula|Use|Source|Caveat): ", text)
    entries = {label.lower(): body.strip() for label, body in zip(pieces[1::2], pieces[2::2], strict=True)}
    return {"summary": pieces[0].strip(), **entries}


def _parameter(declared: Field[Any], hint: Any) -> Parameter:
    optional = isinstance(hint, types.UnionType)
    if optional:
        hint = next(option for option in typing.get_args(hint) if option is not types.NoneType)
    return Parameter(declared.name, typing.get_origin(hint) or hint, optional, declared.default, **declared.metadata)


def _is_number(value: Any, wanted: type) -> bool:
    types_taken = (int, float) if wanted is float else (int,)
    return isinstance(value, types_taken) and not isinstance(value, bool) and value == value


def _inside(value: float, interval: str) -> bool:
    low, high = (float(edge) for edge in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below
