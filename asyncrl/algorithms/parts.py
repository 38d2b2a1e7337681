"""The base of every part of an algorithm, such as a loss or an advantage estimator. A part is a frozen dataclass of
parameters, each declared once with its type, range and meaning.

The command line and the documentation show the class docstring: a first sentence, then the entries `Formula:`, `Use:`,
`Source:` and, if needed, `Caveat:`.
"""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, dataclass_transform

from asyncrl.config.option import Option, option, options
from asyncrl.errors import ConfigError

param = option
"""Declares a parameter of a part."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Part(ABC):
    """Base of all parts. A subclass automatically becomes a frozen dataclass with keyword-only fields. `param` declares
    a field.

    Construction raises ConfigError: a parameter has a wrong type, is outside its range, or conflicts with another.
    """

    kind: ClassVar[str]
    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for parameter in options(type(self)):
            value = getattr(self, parameter.name)
            if not parameter.allows(value):
                raise ConfigError(f"{self.setting(parameter.name)}: it must be {parameter.allowed}")

    @classmethod
    def parameters(cls) -> Sequence[Option]:
        """The parameters that a configuration may set."""
        return options(cls)

    @classmethod
    def build(cls, params: Mapping[str, Any]) -> Self:
        """The part with these parameters. Raises ConfigError: a parameter is unknown, missing or not allowed."""
        known = {parameter.name: parameter for parameter in cls.parameters()}
        for name in params:
            if name not in known:
                raise ConfigError(
                    f"algorithm.{cls.kind} {cls.name} has no parameter {name!r}; it takes {', '.join(known) or 'none'}"
                )
        for name, parameter in known.items():
            if parameter.required and name not in params:
                raise ConfigError(f"algorithm.{cls.kind} {cls.name} needs {name}: {parameter.meaning}")
        return cls(**params)

    @property
    def reads(self) -> Sequence[str]:
        """The names of the scores that the part reads from an episode's labels.

        `Episodes.extra` has only these scores. An episode whose labels lack one of them is not trained.
        """
        return ()

    def setting(self, parameter: str) -> str:
        """The name and value of a parameter, for error messages."""
        return f"algorithm.{self.kind} {self.name}: {parameter}={getattr(self, parameter)!r}"


def card(part: type[Part]) -> dict[str, str]:
    """The entries of the part's docstring: `summary`, and any of `formula`, `use`, `source`, `caveat`."""
    text = re.sub(r"\s+", " ", (part.__doc__ or "").strip())
    pieces = re.split(r" ?\b(Formula|Use|Source|Caveat): ", text)
    entries = {label.lower(): body.strip() for label, body in zip(pieces[1::2], pieces[2::2], strict=True)}
    return {"summary": pieces[0].strip(), **entries}
