"""Runs the program, then serves the judge's requests, one line of JSON each."""

from __future__ import annotations

import json
import operator
import os
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from asyncrl.scoring.asserts.values import BEGUN, decode, encode

Number = Callable[[Any], int]
"""Keeps an object for the judge, and returns its number."""


def main(fd: int, source: str) -> None:
    """Sends BEGUN to the judge, and runs `source`. Then answers the requests from the socket `fd` until the socket is
    closed."""
    os.set_inheritable(fd, False)
    connection = socket.socket(fileno=fd)
    connection.sendall(f"{BEGUN}\n".encode())
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    sys.set_int_max_str_digits(0)
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def number(value: Any) -> int:
        known = numbers.setdefault(id(value), len(objects))
        if known == len(objects):
            objects.append(value)
        return known

    module = ModuleType("program")
    sys.modules["program"] = module
    exec(compile(source, "program.py", "exec", dont_inherit=True), vars(module))
    for line in connection.makefile("r"):
        answer = _answer(json.loads(line), vars(module), objects.__getitem__, number)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _answer(
    request: dict[str, Any], names: dict[str, Any], named: Callable[[Any], Any], number: Number
) -> dict[str, Any]:
    if "globals" in request:
        found = [_global(names[name], number) if name in names else None for name in request["globals"]]
        return {"value": ["list", found]}
    try:
        arguments, options = decode(request["arguments"], named), decode(request["options"], named)
        value = _DO[request["do"]](*arguments, **options)
        # The arguments are sent back because a function may have changed them.
        return {"value": encode(value, number), "arguments": encode(arguments, number)}
    except Exception as error:  # noqa: BLE001 - the tests may expect it
        return {"raised": _classes(type(error)), "text": str(error)[:1000]}


def _global(value: Any, number: Number) -> Any:
    """The encoded value. For a class of exceptions, the names of its base classes are added."""
    if isinstance(value, type) and issubclass(value, Exception):
        return encode([value, _classes(value)], number)
    try:
        return encode([value], number)
    except (RecursionError, TypeError, ValueError):
        return ["list", [["object", number(value)]]]


def _classes(exception: type[Exception]) -> list[str]:
    return [each.__name__ for each in exception.__mro__]


_DO: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *arguments, **options: function(*arguments, **options),
    "getattr": getattr,
    "setattr": setattr,
    "isinstance": isinstance,
    "operator": lambda one, other, name: getattr(operator, name)(one, other),
    "equal": lambda one, other: bool(one == other),
    "item": operator.getitem,
    "set item": operator.setitem,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
}
