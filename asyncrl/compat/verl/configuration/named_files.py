"""Finds mistakes in the files that a configuration names, and in the names of functions and classes in them.

A translation may run on another machine than the training, so a mistake is a line of the report. Nothing is imported:
the names come from the syntax of the file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.compat.rows import at_home
from asyncrl.compat.yaml_files import read_small
from asyncrl.config.keys import near_path, nearest

STAR = "*"
PACKAGE, FILE = "pkg://", "file://"


def missing_file(key: str, path: str) -> str:
    """A line that says that the file `path`, the value of `key`, does not exist. Empty if it exists."""
    if Path(at_home(path)).exists():
        return ""
    near = near_path(at_home(path)) or "; a relative path begins in the folder in which you start from-verl and the run"
    return f"{key}={path}: there is no such file{near}"


def wrong_object(path_key: str, path: str, name_key: str, name: str) -> Iterator[str]:
    """Lines about a Python file that does not exist or is malformed, or that does not define `name`. `path_key` is the
    key of the file's path, and `name_key` the key of `name`. A module of a package (`pkg://`) is not checked."""
    file = path.removeprefix(FILE)
    if path.startswith(PACKAGE) or not file.endswith(".py"):
        return
    if line := missing_file(path_key, file):
        yield line
    elif mistake := _mistake(file, name):
        yield f"{name_key}={name}: {mistake}"


def wrong_class(key: str, path: str) -> Iterator[str]:
    """Lines about mistakes in `path`, the dotted path of a class and the value of `key`. It is checked only if its
    module is a file below the current folder."""
    module, _, name = path.rpartition(".")
    file = f"{module.replace('.', '/')}.py"
    if module and Path(file).is_file() and (mistake := _mistake(file, name)):
        yield f"{key}={path}: {mistake}"


def _mistake(file: str, name: str) -> str:
    """The reason why a Python file gives no `name`; empty if no reason is found."""
    try:
        known = defined_names(Path(at_home(file)))
    except SyntaxError as error:
        return f"line {error.lineno} of {file}: {error.msg}"
    # A file that cannot be read is refused at the start of the run, with the reason.
    except (OSError, ValueError, RecursionError, MemoryError):
        return ""
    if STAR in known or name in known:
        return ""
    near = nearest(name, known)
    return f"{file} has no {name}" + (f"; did you mean {near}?" if near else "")


def defined_names(file: Path) -> list[str]:
    """The names that the syntax of a Python file shows to be in its module; STAR if it imports all names of another
    module. Raises SyntaxError and the errors of `read_small`."""
    return list(_names(ast.parse(read_small(file)).body))


def _names(body: Sequence[ast.AST]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                yield from ((each.asname or each.name).partition(".")[0] for each in imported)
            case ast.Assign() | ast.AnnAssign():
                yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
            case _:
                for part in ("body", "handlers", "orelse", "finalbody"):
                    inner = getattr(node, part, ())
                    yield from _names(inner if isinstance(inner, list) else ())
