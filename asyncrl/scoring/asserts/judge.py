"""The side of the tests: they run here, and whatever they use of the program is asked for over a pipe."""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any, NoReturn, Self

from asyncrl.scoring.asserts import importing
from asyncrl.scoring.asserts.values import decode, encode

UNSUITED = 77
"""The status where the tests hand the program what cannot be handed on."""

_PR_SET_DUMPABLE = 4


def main(program: str, tests: str, passed: str) -> None:
    """Print `passed`, which the program cannot know, if all tests pass; else an exception is raised."""
    with suppress(AttributeError):
        # The program runs as the same user: it must not read this process, its standard input included.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    sys.set_int_max_str_digits(0)
    code = compile(tests, "tests.py", "exec")
    exec(code, {"__name__": "tests", **Remote(program, tests).names})
    # At once: threads that the tests have left do not hold it up.
    _end(passed, 0)


class Remote:
    """The process of the program. `names` are its globals, as far as `tests` mention them."""

    def __init__(self, program: str, tests: str) -> None:
        command = [sys.executable, "-I", "-c", importing("program") + "; main()"]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, text=True)
        self._exceptions: dict[str, type[Exception]] = {}
        told = self._ask(program)["names"]
        self.names = {name: self._global(name, *each) for name, each in told.items() if name in tests}

    def do(self, what: str, /, *arguments: Any, **options: Any) -> Any:
        """Raises what it raised there, or the nearest exception that is known here."""
        request = {"do": what, "arguments": _told(list(arguments)), "options": _told(options)}
        answer = self._ask(request)
        if "raised" in answer:
            error = self._exception(answer["raised"])
            # Elsewhere it would end a loop of the tests, as if all were well.
            wrong = issubclass(error, StopIteration) and what != "next"
            raise (RuntimeError if wrong else error)(answer["text"])
        for given, now in zip(arguments, self._read(answer["arguments"]), strict=True):
            _update(given, now)
        return self._read(answer["value"])

    def _ask(self, request: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(OSError):
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        answer = stdout.readline()
        if not answer:
            # Nothing that a test catches, as it may catch what a program raises.
            raise SystemExit("the program has ended")
        return json.loads(answer)

    def _read(self, value: Any) -> Any:
        return decode(value, lambda name: RemoteObject(self, name))

    def _global(self, name: str, kind: str, told: Any) -> Any:
        if kind == "module":
            # What the program says is imported anew, from where this process imports.
            return importlib.import_module(told)
        if kind == "exception":
            self._exceptions[name] = type(name, (self._exception(told),), {})
            return self._exceptions[name]
        return self._read(told)

    def _exception(self, names: list[str]) -> type[Exception]:
        """The first that is known here of an exception's class and its bases."""
        known = (self._exceptions.get(name) or getattr(builtins, name, None) for name in names)
        return next(each for each in known if isinstance(each, type) and issubclass(each, Exception))


class RemoteObject:
    """An object of the program's. Operators between it and data are not offered: they could say whatever pleases the
    test, or learn from it what is expected."""

    __slots__ = ("_name", "_remote")

    def __init__(self, remote: Remote, name: Any) -> None:
        object.__setattr__(self, "_remote", remote)
        object.__setattr__(self, "_name", name)

    def __call__(self, /, *arguments: Any, **options: Any) -> Any:
        return self._remote.do("call", self, *arguments, **options)

    def __getattr__(self, attribute: str) -> Any:
        return self._remote.do("getattr", self, attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        self._remote.do("setattr", self, attribute, value)

    def __getitem__(self, key: Any) -> Any:
        return self._remote.do("item", self, key)

    def __iter__(self) -> Self:
        found: Self = self._remote.do("iter", self)
        return found

    def __next__(self) -> Any:
        return self._remote.do("next", self)

    def __contains__(self, value: object) -> bool:
        return any(each == value for each in self)

    def __len__(self) -> int:
        return int(self._remote.do("len", self))

    def __bool__(self) -> bool:
        return bool(self._remote.do("bool", self))

    def __str__(self) -> str:
        return str(self._remote.do("str", self))

    def __repr__(self) -> str:
        return str(self._remote.do("repr", self))

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and bool(self._remote.do("equal", self, other))

    def __instancecheck__(self, instance: object) -> bool:
        return type(instance) is RemoteObject and bool(self._remote.do("isinstance", instance, self))


def _told(value: Any) -> Any:
    return encode(value, _name)


def _name(value: Any) -> Any:
    if type(value) is RemoteObject:
        return value._name
    _end(f"they hand the program {value!r:.200}", UNSUITED)


def _end(said: str, status: int) -> NoReturn:
    sys.stdout.write(said)
    sys.stdout.flush()
    os._exit(status)


def _update(given: Any, now: Any) -> None:
    """Let `given`, which the program had a copy of, be as the copy is now."""
    if isinstance(given, list):
        given[:] = now
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)
