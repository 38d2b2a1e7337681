"""Finds the parts of algorithms by kind (such as loss) and name (such as ppo).

A built-in part is found by its name among the classes in the kind's folder (or module). A user's part is named by its
dotted path, such as my_package.losses.MyLoss.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from asyncrl.algorithms.parts import Part
from asyncrl.config.files import choices
from asyncrl.config.imports import imported
from asyncrl.errors import ConfigError

HOMES = {
    "advantage": "advantages",
    "loss": "losses",
    "correction": "corrections",
    "kl": "kl",
    "aggregation": "aggregation",
    "reward": "rewards",
    "value": "losses.value",
    "stream": "loss_streams",
    "lr_scale": "lr_scale",
}
"""The module of each kind within asyncrl.algorithms. The kinds are keys of the section `algorithm`."""


@cache
def parts(kind: str) -> Mapping[str, type[Part]]:
    """The built-in parts of a kind by name, in alphabetical order."""
    home = importlib.import_module(f"asyncrl.algorithms.{HOMES[kind]}")
    found = {part.name: part for module in _modules(home) for part in _declared(module, kind)}
    return dict(sorted(found.items()))


def find(kind: str, name: str, key: str | None = None) -> type[Part]:
    """The part of this kind and name. `key` is the key of `algorithm` that names the part, if this key differs from
    `kind`. Raises ConfigError: no part has the name, or the path is wrong."""
    built_in = parts(kind)
    if name in built_in:
        return built_in[name]
    if "." in name:
        return _imported(kind, name)
    raise ConfigError(
        f"algorithm.{key or kind}={name}: {_hint(name, built_in)}use one of {', '.join(built_in)}, or the dotted path "
        "of your own class"
    )


def build(kind: str, name: str, params: Mapping[str, Any]) -> Part:
    """The part of this kind and name, with the parameters `params`. Raises ConfigError like `find`, or for a wrong
    parameter."""
    return find(kind, name).build(params)


def _hint(name: str, known: Iterable[str]) -> str:
    """A text such as `did you mean gspo? `: the names similar to the unknown `name`, and `algorithm=NAME` if a preset
    has exactly this name. Empty if there is neither."""
    names = list(known)
    near = [each for each in names if name and each.startswith(name)]
    if name in choices("algorithm"):
        near.append(f"the preset algorithm={name}")
    near = near or difflib.get_close_matches(name, names, 1)
    return f"did you mean {' or '.join(near)}? " if near else ""


def _modules(home: ModuleType) -> Iterator[ModuleType]:
    yield home
    for entry in pkgutil.iter_modules(getattr(home, "__path__", [])):
        yield importlib.import_module(f"{home.__name__}.{entry.name}")


def _declared(module: ModuleType, kind: str) -> Iterator[type[Part]]:
    for value in vars(module).values():
        if _is_part(value, kind) and value.__module__ == module.__name__:
            yield value


def _is_part(value: Any, kind: str) -> bool:
    return isinstance(value, type) and issubclass(value, Part) and "name" in vars(value) and value.kind == kind


def _imported(kind: str, path: str) -> type[Part]:
    value = imported(path, f"algorithm.{kind}={path}", "module.Class")
    if not _is_part(value, kind):
        is_kind = isinstance(value, type) and issubclass(value, Part) and getattr(value, "kind", None) == kind
        missing = "give it a class attribute `name`; " if is_kind else ""
        raise ConfigError(
            f"algorithm.{kind}={path} is not a part of kind {kind}: {missing}see docs/algorithms.md, 'A part of yours'"
        )
    part: type[Part] = value
    if unwritten := ", ".join(sorted(getattr(part, "__abstractmethods__", ()))):
        raise ConfigError(f"algorithm.{kind}={path} lacks {unwritten}: see docs/algorithms.md, 'A part of yours'")
    return part
