"""Values as JSON. Data (numbers, texts, containers and the like) is copied; any other object is replaced by a name."""

from __future__ import annotations

from collections import Counter, deque, namedtuple
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

BEGUN = "begun"
"""The line that the program's process sends before it runs the program. The judge then prints it."""

_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)
_MAPPINGS: tuple[Any, ...] = (Counter, dict)

_LEAVES: tuple[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (Fraction, lambda value: str(Fraction(value)), Fraction),
    (Decimal, lambda value: str(Decimal(value)), Decimal),
    (complex, lambda value: str(complex(value)), complex),
    (bytes, bytes.hex, bytes.fromhex),
    (bytearray, bytearray.hex, bytearray.fromhex),
    # A datetime is a date too, so it is tried before date.
    (datetime, datetime.isoformat, datetime.fromisoformat),
    (date, date.isoformat, date.fromisoformat),
    (time, time.isoformat, time.fromisoformat),
    (timedelta, lambda each: [each.days, each.seconds, each.microseconds], lambda content: timedelta(*content)),
    (range, lambda each: [each.start, each.stop, each.step], lambda content: range(*content)),
)
"""Types of data that hold no other values. Each has a function that converts it to JSON, and one that converts it
back."""


def encode(value: Any, name: Callable[[Any], Any]) -> Any:
    """`value` as JSON; `name` returns a name for an object that is not data. An instance of a subclass becomes an
    instance of the plain type, without the subclass's behaviour. Named tuples keep their names. Raises RecursionError:
    `value` is nested too deeply, or contains itself."""

    def inner(value: Any) -> Any:
        if value is None or type(value) in (bool, str, int, float):
            return value
        if isinstance(value, tuple) and (fields := _fields(value)):
            return ["namedtuple", [type(value).__name__, fields, [inner(each) for each in tuple.__iter__(value)]]]
        for container in _CONTAINERS:
            if isinstance(value, container):
                return [container.__name__, [inner(each) for each in container.__iter__(value)]]
        for mapping in _MAPPINGS:
            if isinstance(value, mapping):
                return [mapping.__name__, [[inner(key), inner(each)] for key, each in dict.items(value)]]
        if isinstance(value, str):
            return str.__str__(value)
        for kind, write, _ in _LEAVES:
            if isinstance(value, kind):
                return [kind.__name__, write(value)]
        if type(value) is slice:
            return ["slice", [inner(value.start), inner(value.stop), inner(value.step)]]
        if isinstance(value, Real) and not isinstance(value, type):
            return int(value) if isinstance(value, Integral) else float(value)
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return inner(value.item())
        return ["object", name(value)]

    return inner(value)


def decode(value: Any, named: Callable[[Any], Any]) -> Any:
    """The value that `encode` has turned into JSON; `named` returns the object of a name. The result contains only data
    and objects from `named`, even if the JSON is hostile. Raises an Exception: the JSON has another form."""
    if value is None or isinstance(value, bool | str | int | float):
        return value
    kind, content = value
    if kind == "object":
        return named(content)
    if kind == "slice":
        return slice(*(decode(each, named) for each in content))
    for leaf, _, read in _LEAVES:
        if kind == leaf.__name__:
            return read(content)
    if kind == "namedtuple":
        name, fields, items = content
        return _named_tuple(name, tuple(fields))(*(decode(each, named) for each in items))
    for mapping in _MAPPINGS:
        if kind == mapping.__name__:
            return mapping({decode(key, named): decode(each, named) for key, each in content})
    (container,) = (each for each in _CONTAINERS if each.__name__ == kind)
    return container(decode(each, named) for each in content)


def _fields(value: tuple[Any, ...]) -> list[str]:
    """The names of a named tuple's items; empty for other tuples."""
    fields = getattr(type(value), "_fields", None)
    return list(map(str, fields)) if isinstance(fields, tuple) and len(fields) == len(value) else []


@lru_cache(256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    # `namedtuple` refuses field names with a leading underscore, so no field can replace a method such as `_replace`.
    return namedtuple(name, fields)
