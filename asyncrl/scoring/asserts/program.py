"""The side of the program: runs it, then does what the judge asks, a line of JSON a request."""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import IO, Any

from asyncrl.scoring.asserts.values import decode, encode

Name = Callable[[Any], int]
"""Keeps an object for the judge, and says under which number."""


def main() -> None:
    """The first line is the program; the answer to it its global names, or nothing where it fails."""
    requests, answers = _own_pipes()
    objects: list[Any] = []

    def name(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def read(value: Any) -> Any:
        return decode(value, objects.__getitem__)

    def tell(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(json.loads(requests.readline()), "program.py", "exec"), names)
    tell({"names": _told(names, name)})
    for line in requests:
        tell(_answer(json.loads(line), read, name))


def _own_pipes() -> tuple[IO[str], IO[str]]:
    """The pipes to the judge, out of the way of what the program reads and prints."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    sys.set_int_max_str_digits(0)
    return requests, answers


def _told(names: dict[str, Any], name: Name) -> dict[str, tuple[str, Any]]:
    """What the tests may use. A program that hides a built-in name hides it from itself only."""
    own = {each: value for each, value in names.items() if not hasattr(builtins, each) and each[:2] != "__"}
    return {each: _global(value, name) for each, value in own.items()}


def _global(value: Any, name: Name) -> tuple[str, Any]:
    if isinstance(value, ModuleType):
        return "module", value.__name__
    if isinstance(value, type) and issubclass(value, Exception):
        return "exception", _names(value)
    try:
        return "value", encode(value, name)
    except (RecursionError, TypeError, ValueError):
        return "value", ["object", name(value)]


def _names(exception: type[Exception]) -> list[str]:
    return [each.__name__ for each in exception.__mro__]


def _answer(request: dict[str, Any], read: Callable[[Any], Any], name: Name) -> dict[str, Any]:
    try:
        arguments, options = read(request["arguments"]), read(request["options"])
        value = _DO[request["do"]](*arguments, **options)
        # With what became of the arguments, for a function may change them.
        return {"value": encode(value, name), "arguments": encode(arguments, name)}
    except Exception as error:  # noqa: BLE001 - the tests are told, and may expect it
        return {"raised": _names(type(error)), "text": str(error)[:1000]}


def _call(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


_DO: dict[str, Callable[..., Any]] = {
    "call": _call,
    "getattr": getattr,
    "setattr": setattr,
    "isinstance": isinstance,
    "equal": lambda one, other: bool(one == other),
    "item": lambda value, key: value[key],
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
}
