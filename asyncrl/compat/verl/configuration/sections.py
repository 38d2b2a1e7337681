"""The sections of a configuration of verl, as nested plain values."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.compat.verl.configuration.references import MISSING
from asyncrl.errors import ConfigError

Section = dict[str, Any]
"""Keys with plain values. References are unresolved. A value that only a running script knows is an UnknownValue."""


def written_at(given: Section, key: str) -> Any:
    """The value of a key, with references unresolved; None if the key has no value."""
    node: Any = given
    for name in key.split("."):
        if not isinstance(node, dict) or name not in node:
            return None
        node = node[name]
    return None if node == MISSING else node


def set_key(given: Section, key: str, value: Any) -> None:
    """Set the value of a dotted key; missing sections are added. Raises ConfigError: a section is a list."""
    *sections, name = key.split(".")
    for each in sections:
        if isinstance(given.get(each), list):
            raise ConfigError(f"{key}: it cannot be set: {each} is a list")
        if not isinstance(given.get(each), dict):
            given[each] = {}
        given = given[each]
    if isinstance(value, Mapping) and isinstance(given.get(name), dict):
        for inner, one in value.items():
            set_key(given[name], str(inner), one)
    else:
        given[name] = value


def merged(below: Section, above: Section) -> Section:
    """A new configuration with the values of both. Where both have a key, the value of `above` counts."""
    whole = copy.deepcopy(below)
    for key, value in above.items():
        inner = whole.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            whole[key] = merged(inner, value)
        else:
            whole[key] = copy.deepcopy(value)
    return whole


def without(given: Section, key: str) -> Section:
    """A new configuration without the value of a dotted key."""
    name, _, inner = key.partition(".")
    kept = {each: value for each, value in given.items() if each != name}
    if inner and isinstance(given.get(name), dict):
        kept[name] = without(given[name], inner)
    return kept


def leaves(given: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of all values, and the values as they are written. An empty section is a value."""
    for name, value in given.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
