"""The names of metrics that the sources write, read from them: with ANY for their computed parts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import asyncrl
from tests.observe.registry.unknown import ANY

PACKAGE = Path(asyncrl.__file__).parent


def names_of(place: str) -> list[str]:
    """The keys of the dictionaries that a function makes, such as `learner/step_metrics.py:lag_values`."""
    path, _, function = place.partition(":")
    found = [node for node in _functions(path) if node.name == function]
    assert found, f"there is no {place} any more"
    return sorted({name for node in found for name in _keys(node)})


def logged(room: str) -> dict[str, list[str]]:
    """The keys of dictionaries by file of a room: of those that a sink is given, and those whose type says that it gets
    them."""
    found: dict[str, list[str]] = {}
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for node in ast.walk(_tree(str(path.relative_to(PACKAGE)))):
            if names := [name for part in _for_sinks(node) for name in _keys(part)]:
                found.setdefault(str(path.relative_to(PACKAGE)), []).extend(names)
    return found


def phases(room: str, function: str) -> set[str]:
    """The literal names that a room gives to what measures the seconds of a block, a function or a method."""
    return {
        node.args[0].value
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for node in ast.walk(_tree(str(path.relative_to(PACKAGE))))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == function
        if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    }


def _for_sinks(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Call(func=ast.Attribute(attr="log"), args=[_, ast.Dict() as values]):
            yield values
        case ast.AnnAssign(annotation=kind, value=ast.Dict() as values) if _has_values(kind):
            yield values
        case ast.FunctionDef(returns=ast.expr() as kind) if _has_values(kind):
            yield node


def _has_values(annotation: ast.expr) -> bool:
    return ast.unparse(annotation).endswith("[str, Value]")


def _keys(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        match each:
            case ast.Dict(keys=keys):
                yield from (name for key in keys if (name := _text(key)))
            case ast.DictComp(key=key) | ast.Assign(targets=[ast.Subscript(slice=key)]):
                if name := _text(key):
                    yield name


def _text(key: ast.expr | None) -> str | None:
    """A literal, with ANY for each computed part; None: all of it is computed."""
    match key:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in parts)
    return None


def _functions(path: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(_tree(path)) if isinstance(node, ast.FunctionDef)]


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text())
