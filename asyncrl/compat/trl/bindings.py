"""Finds where a script binds its names, without running it: in which line, to which value, within which branches."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_CHANGING = ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")
"""Methods that change a list or a dictionary."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, *_COMPREHENSIONS)
_PARTED = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


@dataclass(frozen=True, eq=False)
class Place:
    """A function, class or comprehension (`is_scope`), or another part of a script that Python may skip or repeat, such
    as a branch of `if`."""

    is_scope: bool


@dataclass(frozen=True)
class Binding:
    """A `line` in which a name gets or changes its value. `places` are the places around the line, the outermost first.
    `value` is None if only the running script knows it."""

    line: int
    value: ast.expr | None
    places: tuple[Place, ...]


def with_places(tree: ast.AST) -> Iterator[tuple[ast.AST, tuple[Place, ...]]]:
    """Yield every node with the places around it. The names in simple assignments are left out."""
    waiting: list[tuple[ast.AST, tuple[Place, ...]]] = [(tree, ())]
    for node, places in waiting:
        yield node, places
        inside = (*places, Place(True)) if isinstance(node, _SCOPES) else places
        for name, field in ast.iter_fields(node):
            if name in ("target", "targets") and [*_assigned(node)]:
                continue
            of_field = (*inside, Place(False)) if _may_be_skipped(node, name) else inside
            inner = field if isinstance(field, list) else [field]
            waiting += [(each, of_field) for each in inner if isinstance(each, ast.AST)]


def _may_be_skipped(node: ast.AST, field: str) -> bool:
    """True if Python may skip or repeat the statements in a field. `if __name__ == "__main__"` skips nothing, since the
    script is the main program."""
    if field not in ("body", "orelse") or not isinstance(node, _PARTED):
        return False
    return not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and _base(node.test.left) == "__name__")


def is_within(places: tuple[Place, ...], seen: tuple[Place, ...]) -> bool:
    """True if a node within the places `seen` is also within all of `places`."""
    return all(place in seen for place in places)


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The name and the value of a simple assignment."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value


def bound(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """The names that a node binds, and the names of objects that it changes. Each comes with its value, or with None if
    only the running script knows the value."""
    yield from _assigned(node)
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
            yield name, None
        case ast.Subscript(value=owner, ctx=ast.Store() | ast.Del()):
            yield _base(owner), None
        case ast.Call(func=ast.Attribute(value=owner, attr=method)) if method in _CHANGING:
            yield _base(owner), None


def _base(node: ast.AST) -> str:
    """The first name of an expression such as `options["a"].b`; empty for other expressions."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def set_attributes(node: ast.AST) -> Iterator[tuple[str, str, ast.AST]]:
    """The attributes that a node sets: the object's name, the attribute, and its value. If the text does not show the
    value, the node itself takes the place of the value."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                inner = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                for each in inner:
                    if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                        yield each.value.id, each.attr, value if each is target else node
        case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id=name), attr=attribute), value=ast.expr() as value):
            yield name, attribute, value
        case ast.AugAssign(target=ast.Attribute(value=ast.Name(id=name), attr=attribute)):
            yield name, attribute, node
        case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=name), ast.Constant(value=str() as key), value]):
            yield name, key, value
        case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=name), *_]):
            yield name, "**", node
