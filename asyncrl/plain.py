"""Copies of plain values for code that users wrote, which may change all that it is given."""

from __future__ import annotations

import copy
from types import NoneType
from typing import Any, TypeVar

T = TypeVar("T")

_UNCHANGEABLE = frozenset({str, int, float, bool, NoneType, bytes})


def copied(value: T) -> T:
    """A copy with dictionaries and lists of its own at every level. Cheaper than `copy.deepcopy`, which also copies
    values that are not plain: the arguments of a call take a few microseconds.
    """
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
