"""Copies plain values for user code, which may modify its arguments."""

from __future__ import annotations

import copy
from types import NoneType
from typing import Any, TypeVar

T = TypeVar("T")

_UNCHANGEABLE = frozenset({str, int, float, bool, NoneType, bytes})


def copied(value: T) -> T:
    """A deep copy. For plain values this is faster than `copy.deepcopy`: a copy of the arguments of a tool call takes
    only microseconds."""
    made: Any = value
    kind = type(made)
    if kind in _UNCHANGEABLE:
        return value
    if kind is dict:
        made = {name: copied(inner) for name, inner in made.items()}
    elif kind is list or kind is tuple:
        made = kind(map(copied, made))
    else:
        made = copy.deepcopy(made)
    return made  # type: ignore[no-any-return]
