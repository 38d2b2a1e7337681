"""Values as JSON. Numbers, texts, containers and the like are copied; any other object stays and gets a name."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset)
_TEXTS: dict[type, Callable[[str], Any]] = {
    Fraction: Fraction,
    Decimal: Decimal,
    complex: complex,
    bytes: bytes.fromhex,
    bytearray: bytearray.fromhex,
}


def encode(value: Any, name: Callable[[Any], Any]) -> Any:
    """`value` as JSON; `name` is asked what to call an object that is no data. Subclasses become the plain type, so
    that nothing of their behaviour passes. Raises RecursionError: it is nested too deeply, or holds itself."""

    def inner(value: Any) -> Any:
        if value is None or type(value) in (bool, str, int, float):
            return value
        for container in _CONTAINERS:
            if isinstance(value, container):
                return [container.__name__, [inner(each) for each in container.__iter__(value)]]
        if isinstance(value, dict):
            return ["dict", [[inner(key), inner(each)] for key, each in dict.items(value)]]
        if isinstance(value, str):
            return str.__str__(value)
        for kind in _TEXTS:
            if isinstance(value, kind):
                return [kind.__name__, value.hex() if isinstance(value, bytes | bytearray) else str(kind(value))]
        if type(value) is range:
            return ["range", [value.start, value.stop, value.step]]
        if type(value) is slice:
            return ["slice", [inner(value.start), inner(value.stop), inner(value.step)]]
        if isinstance(value, Real) and not isinstance(value, type):
            return int(value) if isinstance(value, Integral) else float(value)
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return inner(value.item())
        return ["object", name(value)]

    return inner(value)


def decode(value: Any, named: Callable[[Any], Any]) -> Any:
    """The value that `encode` has made JSON of; `named` gives the object of a name. Nothing else comes of any JSON.
    Raises an Exception: it is not of that form."""
    if value is None or isinstance(value, bool | str | int | float):
        return value
    kind, content = value
    if kind == "object":
        return named(content)
    if kind == "range":
        return range(*content)
    if kind == "slice":
        return slice(*(decode(each, named) for each in content))
    for text_kind, read in _TEXTS.items():
        if kind == text_kind.__name__:
            return read(content)
    if kind == "dict":
        return {decode(key, named): decode(each, named) for key, each in content}
    (container,) = (each for each in _CONTAINERS if each.__name__ == kind)
    return container(decode(each, named) for each in content)
