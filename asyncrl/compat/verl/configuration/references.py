"""References between the keys of a configuration.

Their forms are `${key}`, `${.key}` (relative to the key's section), and `${oc.select:key,VALUE}` (with a default).

The configuration may come from a stranger. So a reference can read only keys of the same configuration, and the size of
its value is limited.
OmegaConf's resolvers, such as `oc.env`, are never called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from asyncrl.compat.yaml_files import MAX_VALUES

MISSING = "???"
REFERENCE = re.compile(r"\$\{\s*(oc\.select\s*:\s*)?(\.*)([\w-]+(?:\.[\w-]+)*)\s*(?:,([^{}$]*))?\}")
MAX_CHARACTERS = 1 << 16
"""The maximum number of characters of a text after its references are resolved."""
MAX_STEPS = 50
"""The maximum number of keys in a chain of references."""


@dataclass(frozen=True)
class UnknownValue:
    """A value that has an unknown part. `text` is how it is written, and `reason` says what is unknown."""

    text: str
    reason: str


class References:
    """Resolves the references in `root`, a configuration of nested plain values."""

    def __init__(self, root: Mapping[Any, Any]) -> None:
        self._root = root
        self._known: dict[str, Any] = {}
        self._within: list[str] = []
        self._sizes: dict[int, int] = {}

    def resolved(self, value: Any, key: str) -> Any:
        """The value at `key`, with its references resolved.

        Raises ValueError: a reference names an unknown key, refers to itself, or gives too many values; or the value is
        an UnknownValue.
        """
        if isinstance(value, UnknownValue):
            raise ValueError(f"{value.reason}: {value.text:.200}")
        if isinstance(value, Mapping):
            return {name: self.resolved(inner, f"{key}.{name}") for name, inner in value.items()}
        if isinstance(value, list):
            return [self.resolved(inner, f"{key}.{index}") for index, inner in enumerate(value)]
        if not is_reference(value):
            return value
        whole = REFERENCE.fullmatch(value)
        return self._target(whole, key) if whole else self._joined(value, key)

    def _joined(self, text: str, key: str) -> str:
        parts, position, size = [], 0, 0
        for found in REFERENCE.finditer(text):
            value = self._target(found, key)
            if isinstance(value, Mapping | list):
                raise ValueError(f"{found[0]!r:.200} is a section or a list within a text")
            parts += [text[position : found.start()], str(value)]
            position, size = found.end(), size + len(parts[-1])
            if size > MAX_CHARACTERS:
                raise ValueError(f"it becomes longer than {MAX_CHARACTERS} characters")
        joined = "".join([*parts, text[position:]])
        if is_reference(joined):
            raise ValueError(f"only references to other keys are resolved; {text!r:.200} has another kind of reference")
        return joined

    def _target(self, found: re.Match[str], key: str) -> Any:
        """The value that the reference `found`, written at `key`, refers to."""
        selects, dots, name, default = found.groups()
        if default is not None and not selects:
            raise ValueError(f"{found[0]!r:.200} is not a reference to a key")
        parts = [*key.split(".")[: -len(dots)], *name.split(".")] if dots else name.split(".")
        absolute = ".".join(parts)
        if absolute not in self._known:
            if absolute in self._within or len(self._within) >= MAX_STEPS:
                raise ValueError(f"{absolute:.200} refers to itself, or to a chain of more than {MAX_STEPS} keys")
            self._within.append(absolute)
            try:
                self._known[absolute] = self._at(parts)
            finally:
                self._within.pop()
        value = self._known[absolute]
        if value == MISSING:
            if not selects:
                raise ValueError(f"{absolute:.200} has no value")
            return yaml.safe_load(default or "null")
        if self._size(value) > MAX_VALUES:
            raise ValueError(f"it becomes more than {MAX_VALUES} values")
        return value

    def _at(self, parts: list[str]) -> Any:
        """The value at a key; MISSING if the key does not exist."""
        node: Any = self._root
        for index, name in enumerate(parts):
            if isinstance(node, list):
                node = dict(enumerate(node)).get(int(name)) if name.isdecimal() else None
            elif isinstance(node, Mapping) and name in node:
                node = node[name]
            else:
                return MISSING
            if index < len(parts) - 1 and is_reference(node):
                node = self.resolved(node, ".".join(parts[: index + 1]))
        return self.resolved(node, ".".join(parts))

    def _size(self, value: Any) -> int:
        """The number of values in `value`. A shared value counts wherever it occurs, but is visited once."""
        if not isinstance(value, Mapping | list):
            return 1
        if id(value) not in self._sizes:
            inner = value.values() if isinstance(value, Mapping) else value
            self._sizes[id(value)] = 1 + sum(map(self._size, inner))
        return self._sizes[id(value)]


def is_reference(value: Any) -> bool:
    """True if OmegaConf would look for a reference in the value."""
    return isinstance(value, str) and "${" in value


def has_reference(value: Any) -> bool:
    """True if the value is a reference or contains one."""
    if isinstance(value, Mapping):
        return any(map(has_reference, value.values()))
    return any(map(has_reference, value)) if isinstance(value, list | tuple) else is_reference(value)
