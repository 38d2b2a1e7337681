"""Runs the tests. Over a socket they call the program, which runs in another process."""

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

from asyncrl.scoring.asserts.values import BEGUN, decode, encode

PASSED, FAILED, ENDED, UNSUITED, UNCLEAR = "passed", "failed", "ended", "unsuited", "unclear"
"""The verdicts, which are the second word of the output. The first word is BEGUN. If it is missing, the judge or the
program could not start. `ended`: the program's process ended during the tests, by a fault of the program or of its
sandbox. `unsuited`: the tests cannot judge any program; a reason follows. `unclear`: the tests pass a value that is not
data to an object of the program. Either the tests always do this, or this program returned an object instead of
data."""

_PR_SET_DUMPABLE = 4
_MAX_ANSWER = 16 << 20
_ALIASES = {"np": "numpy", "pd": "pandas"}


def main(fd: int, tests: str) -> None:
    """Runs the tests against the program at the socket `fd`, prints the verdict, and ends the process."""
    with suppress(AttributeError):
        # Without Linux namespaces the program runs as the same user: it must not read this process's memory.
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    sys.set_int_max_str_digits(0)
    verdict = VerdictOutput()
    program = Program(fd, verdict)
    if not program.begins():
        os._exit(0)
    verdict.begin()
    try:
        run(tests, program, verdict)
    except SystemExit as end:
        # `unittest.main` raises SystemExit. The program's own exceptions cannot reach this place as a SystemExit.
        if end.code:
            verdict.give(FAILED)
    except BaseException:  # noqa: BLE001 - any exception of the tests is their verdict
        verdict.give(FAILED)
    if program.used:
        verdict.give(PASSED)
    if program.lacks_all:
        verdict.give(FAILED)
    verdict.give(UNSUITED, "they use nothing of the program: call the functions that hold the asserts")


class VerdictOutput:
    """Standard output, separated from anything that the tests print."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)

    def begin(self) -> None:
        """Prints that judge and program have started."""
        os.write(self._out, f"{BEGUN} ".encode())

    def give(self, word: str, reason: str = "") -> NoReturn:
        """Prints the verdict and ends the process at once. The tests cannot catch this, and their threads end too."""
        os.write(self._out, f"{word} {reason}".encode(errors="replace"))
        os._exit(0)


def run(tests: str, program: Program, verdict: VerdictOutput) -> None:
    """Runs the tests, and raises their exceptions."""
    tree = ast.parse(tests, "tests.py")
    modules, others = _names(tests, tree)
    for name in [*_imports(tree), *modules.values()]:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            verdict.give(UNSUITED, f"they use the module {name}, which is not installed where they run")
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    vars(module).update(program.globals(others))
    vars(module).update({name: importlib.import_module(each) for name, each in modules.items()})
    exec(compile(tree, "tests.py", "exec", dont_inherit=True, optimize=0), vars(module))


def _names(tests: str, tree: ast.Module) -> tuple[dict[str, str], list[str]]:
    """The global names that the tests use: names of modules, and names that the program must define.

    A built-in name always means the built-in. The name of a known module means that module if the tests use only
    attributes of it. In both cases the program's own definition of the name is ignored.
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
    """The modules that the tests import, except within `try`, where they handle a missing module themselves."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
    elif not isinstance(node, ast.Try):
        for child in ast.iter_child_nodes(node):
            yield from _imports(child)


class Program:
    """The connection to the program's process.

    - `used`: the tests have used data or operations of the program, not only handles to its objects.
    - `lacks_all`: the program defines none of the names that the tests use.
    """

    def __init__(self, fd: int, verdict: VerdictOutput) -> None:
        self._socket = socket.socket(fileno=fd)
        self._file = self._socket.makefile("rb")
        self._verdict = verdict
        self._one_at_a_time = threading.Lock()
        self._objects: dict[Any, ProgramObject] = {}
        self._exceptions: dict[str, type[Exception]] = {}
        self._numbers: dict[type[Exception], Any] = {}
        # The numbers of objects that the tests know only by a global name, because no answer has contained them yet.
        self._named: set[Any] = set()
        self.used = self.lacks_all = False

    def begins(self) -> bool:
        """Wait until the program begins. False: its process ended before that."""
        return bool(self._file.readline(len(BEGUN) + 1) == f"{BEGUN}\n".encode())

    def globals(self, names: list[str]) -> dict[str, Any]:
        """The values of the `names` that the program defines."""
        answers = zip(names, self._decode(self._request({"globals": names})["value"]), strict=True)
        found = {name: self._global(name, *each) for name, each in answers if each is not None}
        self._named = {each._number for each in found.values() if type(each) is ProgramObject}
        self.used = any(not isinstance(each, ProgramObject | type) for each in found.values())
        self.lacks_all = bool(names) and not found
        return found

    def do(self, what: str, /, *arguments: Any, **options: Any) -> Any:
        """The result of an operation in the program's process. If the operation raises, this raises an exception of the
        same class, or of its nearest base class that is known here."""
        self.used = True
        by_name = what in ("call", "setattr") and arguments[0]._number in self._named

        def number(value: Any) -> Any:
            return self._number(value, by_name)

        given = encode(list(arguments), number), encode(options, number)
        answer = self._request({"do": what, "arguments": given[0], "options": given[1]})
        if "raised" in answer:
            raise self._exception(answer["raised"], answer["text"], what)
        try:
            for mine, now in zip(arguments, answer["arguments"][1], strict=True):
                if type(mine) is not ProgramObject:
                    _update(mine, self._decode(now))
            return self._decode(answer["value"])
        except Exception:  # noqa: BLE001 - the tests must not mistake it for an exception of the program
            self._verdict.give(FAILED)

    def _request(self, request: Any) -> Any:
        """The answer to a request. An answer that is malformed or too long ends the tests."""
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
        except Exception:  # noqa: BLE001 - the program's side sent something malformed
            self._verdict.give(FAILED)

    def _decode(self, value: Any) -> Any:
        return decode(value, self._object)

    def _object(self, number: Any) -> ProgramObject:
        # The tests got the object in an answer, so from now on they may use it where they expect data.
        self._named.discard(number)
        # Each object has only one handle, so that `is` works as it does in the program.
        return self._objects.setdefault(number, ProgramObject(self, number))

    def _number(self, value: Any, by_name: bool) -> Any:
        """The number of `value`, an object of the program. Any other value ends the tests. `by_name`: the tests pass
        the value to an object that they know by its global name, so the tests are at fault, not the program."""
        if type(value) is ProgramObject:
            return value._number
        if isinstance(value, type) and value in self._numbers:
            return self._numbers[value]
        if isinstance(value, BaseException):
            # The program may have raised it, so the tests are not at fault.
            raise TypeError("an exception cannot be given to the program")
        self._verdict.give(UNSUITED if by_name else UNCLEAR, f"they hand the program {value!r:.200}")

    def _global(self, name: str, value: Any, exception: Any = None) -> Any:
        """Return `value`. For a class of exceptions, return a new class with the same name, derived from its nearest
        base class that is known here."""
        if exception is None:
            return value
        self._exceptions[name] = type(name, (type(self._exception(exception, "", "")),), {})
        self._numbers[self._exceptions[name]] = value._number
        return self._exceptions[name]

    def _exception(self, names: list[str], text: str, during: str) -> Exception:
        """An exception with `text`, of the first class in `names` that is known here and accepts a text."""
        for name in names:
            known = self._exceptions.get(name) or getattr(builtins, name, None)
            if not isinstance(known, type) or not issubclass(known, Exception):
                continue
            if issubclass(known, StopIteration | StopAsyncIteration) and during != "next":
                # If StopIteration were raised outside of `next`, it could end a loop in the tests, and the tests would
                # not fail.
                known = RuntimeError
            with suppress(TypeError):
                return known(text)
        return RuntimeError(text)


class ProgramObject:
    """A handle to an object of the program.

    Operators work only between two handles. If tests could compare a handle with data, the program could learn the
    expected value, or answer that its object equals every value.
    """

    __slots__ = ("_number", "_program")

    def __init__(self, program: Program, number: Any) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, /, *arguments: Any, **options: Any) -> Any:
        return self._program.do("call", self, *arguments, **options)

    def __getattr__(self, attribute: str) -> Any:
        if attribute[:2] == "__":
            # Through attributes with such names, libraries read more than data, for example addresses in memory.
            raise AttributeError(attribute)
        return self._program.do("getattr", self, attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        self._program.do("setattr", self, attribute, value)

    def __getitem__(self, key: Any) -> Any:
        return self._program.do("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._program.do("set item", self, key, value)

    def __iter__(self) -> Self:
        iterator = self._program.do("iter", self)
        if type(iterator) is not ProgramObject:
            raise TypeError("the program gave data instead of an iterator")
        return iterator  # type: ignore[return-value]

    def __next__(self) -> Any:
        return self._program.do("next", self)

    def __contains__(self, value: object) -> bool:
        return any(each == value for each in self)

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        self._program.used = True
        return isinstance(other, ProgramObject) and bool(self._program.do("equal", self, other))

    def __instancecheck__(self, instance: object) -> bool:
        return type(instance) is ProgramObject and bool(self._program.do("isinstance", instance, self))


def _operator(name: str) -> Callable[[ProgramObject, object], Any]:
    def operate(one: ProgramObject, other: object) -> Any:
        return one._program.do("operator", one, other, name) if isinstance(other, ProgramObject) else NotImplemented

    return operate


for _name, _kind in {"len": int, "bool": bool, "str": str, "repr": str}.items():
    setattr(ProgramObject, f"__{_name}__", lambda self, name=_name, kind=_kind: kind(self._program.do(name, self)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "and", "or", "xor", "lt", "le", "gt", "ge"):
    setattr(ProgramObject, f"__{_name}__", _operator(f"__{_name}__"))


def _update(given: Any, now: Any) -> None:
    """Changes `given`, so that it equals the program's copy of it. The program may have changed its copy."""
    if isinstance(given, list):
        given[:] = now
    elif isinstance(given, deque):
        given.clear()
        given.extend(now)
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)
