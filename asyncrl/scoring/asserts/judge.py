"""The side of the tests: they run here, and whatever they use of the program is asked for over a socket."""

from __future__ import annotations

import ast
import builtins
import ctypes
import importlib
import importlib.util
import json
import os
import socket
import symtable
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn, Self

from asyncrl.scoring.asserts.values import decode, encode

PASSED, FAILED, ENDED, UNSUITED, UNCLEAR = "passed", "failed", "ended", "unsuited", "unclear"
"""The first word of the output. `ended`: the program's side has gone, so the tests have failed, or its sandbox has.
`unsuited`: the tests cannot judge any program, for the reason that follows. `unclear`: they hand an object what is no
data, which may be so for any program, or because this one has answered with an object where data was due."""

_PR_SET_DUMPABLE = 4
_MAX_ANSWER = 16 << 20
_ALIASES = {"np": "numpy", "pd": "pandas"}


def main(fd: int, tests: str) -> None:
    """Run the tests against the program at the socket `fd`, print the verdict, and end the process."""
    with suppress(AttributeError):
        # Without namespaces the program runs as the same user: it must not read this process.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    sys.set_int_max_str_digits(0)
    verdict = Verdict()
    remote = Remote(fd, verdict)
    try:
        run(tests, remote, verdict)
    except SystemExit as end:
        # unittest.main ends in this way. The program cannot: it has no way to raise this here.
        if end.code:
            verdict.give(FAILED)
    except BaseException:  # noqa: BLE001 - it is what the tests say of the program
        verdict.give(FAILED)
    if remote.used:
        verdict.give(PASSED)
    if remote.lacks_all:
        verdict.give(FAILED)
    verdict.give(UNSUITED, "they use nothing of the program: call the functions that hold the asserts")


class Verdict:
    """Standard output, out of the way of what the tests print."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)

    def give(self, word: str, reason: str = "") -> NoReturn:
        """At once, whatever the tests would catch, and without waiting for threads that they have left."""
        os.write(self._out, f"{word} {reason}".encode(errors="replace"))
        os._exit(0)


def run(tests: str, remote: Remote, verdict: Verdict) -> None:
    """Raises what the tests raise."""
    tree = ast.parse(tests, "tests.py")
    modules, others = _names(tests, tree)
    for name in [*_imports(tree), *modules.values()]:
        if not _installed(name):
            verdict.give(UNSUITED, f"they use the module {name}, which is not installed where they run")
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    vars(module).update(remote.globals(others))
    vars(module).update({name: importlib.import_module(each) for name, each in modules.items()})
    exec(compile(tree, "tests.py", "exec", dont_inherit=True, optimize=0), vars(module))


def _names(tests: str, tree: ast.Module) -> tuple[dict[str, str], list[str]]:
    """The global names that the tests use: modules, by what they are called; and those that the program must define.

    A built-in name is the built-in, and the name of a known module of which only attributes are used is that module,
    whatever the program has made of either.
    """
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    otherwise = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in bases}
    used = {name for name in _globals(symtable.symtable(tests, "tests.py", "exec")) if not hasattr(builtins, name)}
    known = {name for name in used - otherwise if name in _ALIASES or name in sys.stdlib_module_names}
    return {name: _ALIASES.get(name, name) for name in known}, sorted(used - known)


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    top = table.get_type() == "module"
    yield from (each.get_name() for each in table.get_symbols() if each.is_referenced() and (top or each.is_global()))
    for child in table.get_children():
        yield from _globals(child)


def _imports(node: ast.AST) -> Iterator[str]:
    """What the tests import, unless they see to its absence."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
    elif not isinstance(node, ast.Try):
        for child in ast.iter_child_nodes(node):
            yield from _imports(child)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


class Remote:
    """The process of the program. `used`: the tests have had more of it than handles; `lacks_all`: it defines nothing
    of what they use."""

    def __init__(self, fd: int, verdict: Verdict) -> None:
        self._socket = socket.socket(fileno=fd)
        self._file = self._socket.makefile("rb")
        self._verdict = verdict
        self._one_at_a_time = threading.Lock()
        self._objects: dict[Any, RemoteObject] = {}
        self._exceptions: dict[str, type[Exception]] = {}
        self._numbers: dict[type[Exception], Any] = {}
        # The objects that the tests have only by the names that they use.
        self._named: set[Any] = set()
        self.used = self.lacks_all = False

    def globals(self, names: list[str]) -> dict[str, Any]:
        """Those of `names` that the program defines."""
        answers = zip(names, self._decode(self._ask({"globals": names})["value"]), strict=True)
        found = {name: self._global(name, *each) for name, each in answers if each is not None}
        self._named = {each._number for each in found.values() if type(each) is RemoteObject}
        self.used = any(not isinstance(each, RemoteObject | type) for each in found.values())
        self.lacks_all = bool(names) and not found
        return found

    def do(self, what: str, /, *arguments: Any, **options: Any) -> Any:
        """Raises what it raised there, or the nearest exception that is known here."""
        self.used = True
        by_name = what in ("call", "setattr") and arguments[0]._number in self._named

        def number(value: Any) -> Any:
            return self._number(value, by_name)

        given = encode(list(arguments), number), encode(options, number)
        answer = self._ask({"do": what, "arguments": given[0], "options": given[1]})
        if "raised" in answer:
            raise self._exception(answer["raised"], answer["text"], what)
        try:
            for mine, now in zip(arguments, answer["arguments"][1], strict=True):
                if type(mine) is not RemoteObject:
                    _update(mine, self._decode(now))
            return self._decode(answer["value"])
        except Exception:  # noqa: BLE001 - the tests must not take it for an exception of the program
            self._verdict.give(FAILED)

    def _ask(self, request: Any) -> Any:
        """The answer. What is none, or too long, is the end of the tests."""
        with self._one_at_a_time:
            with suppress(OSError):
                self._socket.sendall(json.dumps(request).encode() + b"\n")
            line = self._file.readline(_MAX_ANSWER)
        if not line:
            self._verdict.give(ENDED)
        try:
            answer = json.loads(line)
            if "raised" in answer:
                return {"raised": [str(each) for each in answer["raised"]], "text": str(answer["text"])}
            return dict(answer)
        except Exception:  # noqa: BLE001 - the program's side has answered with what is no answer
            self._verdict.give(FAILED)

    def _decode(self, value: Any) -> Any:
        return decode(value, self._object)

    def _object(self, number: Any) -> RemoteObject:
        # An answer holds it: from now on the tests may have it where they expect data.
        self._named.discard(number)
        # One for each object, so that `is` holds between two that are the same there.
        return self._objects.setdefault(number, RemoteObject(self, number))

    def _number(self, value: Any, by_name: bool) -> Any:
        """The number of one of the program's objects. What is none ends the tests: `by_name`, they hand it to what they
        name themselves, so that this is no doing of the program's."""
        if type(value) is RemoteObject:
            return value._number
        if isinstance(value, type) and value in self._numbers:
            return self._numbers[value]
        if isinstance(value, BaseException):
            # The program may have raised it, so this is not the fault of the tests.
            raise TypeError("an exception cannot be given to the program")
        self._verdict.give(UNSUITED if by_name else UNCLEAR, f"they hand the program {value!r:.200}")

    def _global(self, name: str, value: Any, exception: Any = None) -> Any:
        """The value; for a class of exceptions, one of the same name and nearest base is made here."""
        if exception is None:
            return value
        self._exceptions[name] = type(name, (type(self._exception(exception, "", "")),), {})
        self._numbers[self._exceptions[name]] = value._number
        return self._exceptions[name]

    def _exception(self, names: list[str], text: str, during: str) -> Exception:
        """The first that is known here, and can be made of a text, of an exception's class and its bases."""
        for name in names:
            known = self._exceptions.get(name) or getattr(builtins, name, None)
            if not isinstance(known, type) or not issubclass(known, Exception):
                continue
            if issubclass(known, StopIteration | StopAsyncIteration) and during != "next":
                # Elsewhere it would end a loop of the tests, as if all were well.
                known = RuntimeError
            with suppress(TypeError):
                return known(text)
        return RuntimeError(text)


class RemoteObject:
    """An object of the program's. Operators between it and data are not offered: they could say whatever pleases the
    test, or learn from it what is expected. Those between two such objects cannot."""

    __slots__ = ("_number", "_remote")

    def __init__(self, remote: Remote, number: Any) -> None:
        object.__setattr__(self, "_remote", remote)
        object.__setattr__(self, "_number", number)

    def __call__(self, /, *arguments: Any, **options: Any) -> Any:
        return self._remote.do("call", self, *arguments, **options)

    def __getattr__(self, attribute: str) -> Any:
        if attribute[:2] == "__":
            # Protocols by which libraries take an object for more than data, such as an address in memory.
            raise AttributeError(attribute)
        return self._remote.do("getattr", self, attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        self._remote.do("setattr", self, attribute, value)

    def __getitem__(self, key: Any) -> Any:
        return self._remote.do("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._remote.do("set item", self, key, value)

    def __iter__(self) -> Self:
        found = self._remote.do("iter", self)
        if type(found) is not RemoteObject:
            raise TypeError("an iterator is no data")
        return found  # type: ignore[return-value]

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
        self._remote.used = True
        return isinstance(other, RemoteObject) and bool(self._remote.do("equal", self, other))

    def __instancecheck__(self, instance: object) -> bool:
        return type(instance) is RemoteObject and bool(self._remote.do("isinstance", instance, self))


def _operator(name: str) -> Callable[[RemoteObject, object], Any]:
    def operate(one: RemoteObject, other: object) -> Any:
        return one._remote.do("operator", one, other, name) if isinstance(other, RemoteObject) else NotImplemented

    return operate


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "and", "or", "xor", "lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", _operator(f"__{_name}__"))


def _update(given: Any, now: Any) -> None:
    """Let `given`, which the program had a copy of, be as the copy is now."""
    if isinstance(given, list):
        given[:] = now
    elif isinstance(given, deque):
        given.clear()
        given.extend(now)
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)
