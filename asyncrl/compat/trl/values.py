"""Finds values in a Python script without running it: constants, arithmetic on them, names of functions, and data sets.

The script may come from a stranger, so the number of steps and the size of values are limited.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from asyncrl.compat.trl.bindings import Binding, Place, bound, is_within, set_attributes, with_places

MAX_STEPS = 20_000
MAX_CHARACTERS = 1 << 16
MAX_NUMBER = 1e18
_SUMS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_OF_ROWS = ("load_dataset", "load_from_disk", "from_list", "from_dict", "from_generator", "from_pandas")
_TRIVIAL = ("with_format", "shuffle")
"""Methods of a data set that change no row. The run shuffles the rows itself."""
_LOAD_DATASET = ("path", "name", "data_dir", "data_files", "split")
"""The first arguments of `load_dataset`, in order."""
_SAME_ROWS = (
    *("cache_dir", "download_config", "download_mode", "verification_mode", "token", "trust_remote_code"),
    *("keep_in_memory", "num_proc", "streaming"),
)
"""Arguments of `load_dataset` that do not change which rows it reads."""


class UnknownValueError(ValueError):
    """Only the running script knows this value."""


@dataclass(frozen=True)
class Named:
    """A function or class by its dotted path. `defined_here` is true if the script defines it. `names` are the names
    that the body of a class defines. None: they are unknown, or the class inherits further names."""

    path: str
    defined_here: bool = False
    names: frozenset[str] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Unread:
    """An item of a list whose value only the running script knows. `text` is its source."""

    text: str


@dataclass(frozen=True)
class ScriptRows:
    """A data set of a script.

    - `source`: its name in `data.train`; empty if the script makes the rows
    - `splits`: true if the script loads all splits, so that one must be chosen
    - `changes`: the names of the methods that change its rows
    - `expression`: its text in the script, such as the name of a variable
    """

    source: str
    splits: bool = False
    changes: tuple[str, ...] = ()
    expression: str = ""


@dataclass(frozen=True)
class MadeOf:
    """The call of a class, such as `LoraConfig`, with its keywords."""

    name: str
    keywords: Mapping[str, Any]


class Script:
    """Finds values in `text`, the source of a script. The dotted paths of its functions begin with `module`.

    Raises SyntaxError: the text is not Python.
    """

    def __init__(self, text: str, module: str) -> None:
        self.tree = ast.parse(text)
        self._module = module
        self._steps = 0
        self._imports: dict[str, str] = {}
        self._bindings: dict[str, list[Binding]] = {}
        self._places: dict[ast.AST, tuple[Place, ...]] = {}
        self._defined: set[str] = set()
        for node, places in with_places(self.tree):
            self._places[node] = places
            self._note(node, places)

    def value(self, node: ast.AST) -> Any:
        """The value of an expression. Raises UnknownValueError: only the running script knows it."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise UnknownValueError(f"the script's values take more than {MAX_STEPS} steps")
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as constant):
                return self._limited(constant)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(each) for each in items]
            case ast.Dict(keys=keys, values=values) if None not in keys:
                names = [self.value(each) for each in keys if each is not None]
                return dict(zip(map(str, names), map(self.value, values), strict=True))
            case ast.Name(id=name):
                return self._of_name(name, node)
            case ast.Attribute(value=owner, attr=name):
                return self._of_attribute(self.value(owner), name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._number(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _SUMS:
                return self._sum(type(op), self.value(left), self.value(right))
            case ast.JoinedStr(values=parts):
                text = ""
                for part in parts:
                    text = self._text(text + str(self._plain(part)))
                return text
            case ast.FormattedValue(value=inner, conversion=-1 | 115, format_spec=None):  # 115: !s, as without it
                return self.value(inner)
            case ast.Subscript(value=owner, slice=index):
                return self._item(self.value(owner), self.value(index))
            case ast.Call():
                return self._call(node)
        raise UnknownValueError(ast.unparse(node)[:80])

    def items(self, node: ast.AST) -> Any:
        """The value of an expression; in a list, an item that only the running script knows is `Unread`.

        Raises UnknownValueError: the expression is not a list, and only the running script knows its value.
        """
        match node:
            case ast.Name(id=name) if (last := self._last_binding(name, node)) is not None:
                known = is_within(last.places, self._places[node])
                if isinstance(last.value, ast.List | ast.Tuple) and known:
                    return self.items(last.value)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._item_of_list(each) for each in items]
        return self.value(node)

    def calls(self, name: str) -> Iterator[ast.Call]:
        """The calls of the class `name`, in order."""
        found = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        yield from sorted((node for node in found if last_name(node.func) == name), key=lambda node: node.lineno)

    def attributes_of(self, call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
        """The attributes that the script sets on the object that `call` makes, as in `config.beta = 0.1`.

        Each comes with the expression of its value. If only the running script knows the value, the statement that sets
        the attribute takes the place of the expression.
        """
        names = {name for name, found in self._bindings.items() if any(each.value is call for each in found)}
        for node in self._places:
            for name, attribute, value in set_attributes(node):
                if name in names:
                    is_sure = is_within(self._places[node], self._places[call])
                    yield attribute, value if is_sure else node

    def names_in_class(self, name: str) -> frozenset[str] | None:
        """The names that the body of a class defines. None: there is no such class, or it has bases or decorators."""
        found = [each for each in self.tree.body if isinstance(each, ast.ClassDef) and each.name == name]
        if not found or found[-1].bases or found[-1].keywords or found[-1].decorator_list:
            return None
        names = [each.name for each in found[-1].body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        names += [name for each in found[-1].body for name, _ in bound(each)]
        return frozenset(names)

    def imported_packages(self) -> set[str]:
        """The packages that the script imports outside functions and branches."""
        names = [each.name for node in self.tree.body if isinstance(node, ast.Import) for each in node.names]
        names += [node.module or "" for node in self.tree.body if isinstance(node, ast.ImportFrom) and not node.level]
        return {name.partition(".")[0] for name in names}

    def trains_when_imported(self) -> bool:
        """True if importing the script calls `.train()`."""
        return any(
            isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr == "train"
            for node in self.tree.body
            if isinstance(node, ast.Expr | ast.Assign)
            for inner in ast.walk(node)
        )

    def _note(self, node: ast.AST, places: tuple[Place, ...]) -> None:
        for name, value in bound(node):
            line = getattr(node, "lineno", 0)
            self._bindings.setdefault(name, []).append(Binding(line, value, places))
        match node:
            case ast.Import(names=names):
                self._imports |= {
                    each.asname or each.name.partition(".")[0]: (each.asname and each.name)
                    or each.name.partition(".")[0]
                    for each in names
                }
            case ast.ImportFrom(module=str() as module, names=names, level=0):
                self._imports |= {each.asname or each.name: f"{module}.{each.name}" for each in names}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self._defined.add(name)

    def _item_of_list(self, node: ast.expr) -> Any:
        try:
            return self.value(node)
        except (UnknownValueError, ValueError, TypeError, OverflowError):
            return Unread(ast.unparse(node)[:80])

    def _of_name(self, name: str, node: ast.expr) -> Any:
        if (last := self._last_binding(name, node)) is not None:
            if last.value is None:
                raise UnknownValueError(f"{name}, which line {last.line} sets")
            if not is_within(last.places, self._places[node]):
                raise UnknownValueError(f"{name}, which line {last.line} may set")
            try:
                return self.value(last.value)
            except UnknownValueError:
                # The name may hold a function that another function returns. A run can import it by its name.
                if isinstance(last.value, ast.Lambda) or (
                    isinstance(last.value, ast.Call) and last_name(last.value.func)[:1].islower()
                ):
                    return Named(f"{self._module}.{name}", True)
                raise
        if name in self._defined:
            return Named(f"{self._module}.{name}", True)
        if name in self._imports:
            return Named(self._imports[name])
        raise UnknownValueError(name)

    def _last_binding(self, name: str, node: ast.expr) -> Binding | None:
        """The last binding of `name` before `node`. Bindings in other functions do not count."""
        seen = self._places[node]
        before = [
            each
            for each in self._bindings.get(name, ())
            if each.line < node.lineno and all(place in seen for place in each.places if place.is_scope)
        ]
        return max(before, key=lambda each: each.line, default=None)

    def _of_attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Named):
            return Named(f"{owner.path}.{name}", owner.defined_here)
        raise UnknownValueError(name)

    def _number(self, node: ast.expr) -> Any:
        value = self.value(node)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnknownValueError(ast.unparse(node)[:80])
        return value

    def _sum(self, op: type[ast.operator], left: Any, right: Any) -> Any:
        texts = isinstance(left, str) and isinstance(right, str) and op is ast.Add
        lists = isinstance(left, list) and isinstance(right, list) and op is ast.Add
        numbers = all(isinstance(each, int | float) for each in (left, right))
        if not (texts or lists or numbers):
            raise UnknownValueError("a sum of other values than numbers or texts")
        if numbers and right == 0 and op not in (ast.Add, ast.Sub, ast.Mult):
            raise UnknownValueError("a division by zero")
        made = _SUMS[op](left, right)
        return self._text(made) if texts else self._limited(made)

    def _limited(self, value: Any) -> Any:
        if isinstance(value, int | float) and not abs(value) <= MAX_NUMBER:
            raise UnknownValueError("a number that is too large")
        return value

    def _text(self, text: str) -> str:
        if len(text) > MAX_CHARACTERS:
            raise UnknownValueError(f"a text of more than {MAX_CHARACTERS} characters")
        return text

    def _plain(self, node: ast.expr) -> Any:
        value = self.value(node)
        if not isinstance(value, str | int | float):
            raise UnknownValueError(ast.unparse(node)[:80])
        return value

    def _item(self, owner: Any, index: Any) -> Any:
        if isinstance(owner, ScriptRows) and isinstance(index, str):
            return split_of(owner, index)
        if isinstance(owner, Mapping) and index in owner:
            return owner[index]
        raise UnknownValueError(f"[{index!r}]"[:80])

    def _call(self, node: ast.Call) -> Any:
        name = last_name(node.func)
        if name in _OF_ROWS:
            return self._rows(name, node)
        if isinstance(node.func, ast.Attribute) and name not in ("from_pretrained", "join", "get"):
            owner = self.value(node.func.value)
            if isinstance(owner, ScriptRows):
                return owner if name in _TRIVIAL else replace(owner, changes=(*owner.changes, name))
        if name == "from_pretrained" and node.args:
            return self.value(node.args[0])
        if name == "dict" and not node.args:
            return self.keywords(node)
        if name[:1].isupper():
            return MadeOf(name, self.keywords(node))
        raise UnknownValueError(ast.unparse(node)[:80])

    def keywords(self, node: ast.Call) -> dict[str, Any]:
        """The values of a call's keywords; `**NAME` is expanded. Raises UnknownValueError: only the running script
        knows one of them."""
        found: dict[str, Any] = {}
        for each in node.keywords:
            value = self.value(each.value)
            found |= {each.arg: value} if each.arg is not None else dict(value)
        return found

    def _rows(self, name: str, node: ast.Call) -> ScriptRows:
        if name not in _OF_ROWS[:2]:
            return ScriptRows("")
        words = [self.value(each) for each in node.args]
        keywords = self.keywords(node)
        if name == "load_from_disk":
            return ScriptRows(str(words[0] if words else keywords.get("dataset_path", "")))
        return rows_of({**dict(zip(_LOAD_DATASET, words, strict=False)), **keywords})


def rows_of(arguments: Mapping[str, Any]) -> ScriptRows:
    """The rows that `datasets.load_dataset` reads with these arguments. Their source is empty if no source of asyncrl
    reads the same rows."""
    given = {name: value for name, value in arguments.items() if value is not None and name not in _SAME_ROWS}
    path, split, files = given.pop("path", None), given.pop("split", None), given.pop("data_files", None)
    options = {"config": given.pop("name", None), "split": split, "revision": given.pop("revision", None)}
    if given or not isinstance(path, str) or not isinstance(split, str | None):
        return ScriptRows("")
    if path in ("json", "parquet", "arrow"):
        if isinstance(files, dict):
            files = files.get(split)
        # A part of a split, such as train[:90%], has not all rows of its files.
        whole = not {"[", "+"} & {*(split or "")}
        return ScriptRows(files) if isinstance(files, str) and whole else ScriptRows("")
    if files is not None:
        return ScriptRows("")
    query = "&".join(_option(name, value) for name, value in options.items() if value is not None)
    return ScriptRows(f"hub:{path}{'?' if query else ''}{query}", splits=split is None)


def split_of(rows: ScriptRows, split: str) -> ScriptRows:
    """One split of a data set that was loaded with all its splits. Another data set is returned unchanged."""
    if not rows.splits:
        return rows
    return ScriptRows(
        f"{rows.source}{'&' if '?' in rows.source else '?'}{_option('split', split)}", changes=rows.changes
    )


def _option(name: str, value: Any) -> str:
    # The source decodes % and + as in a URL. So a split such as train+test must be encoded.
    return f"{name}={quote(str(value), safe='/:[]')}"


def last_name(node: ast.expr) -> str:
    """The last name of a dotted name, such as `GRPOConfig` of `trl.GRPOConfig`; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
