"""Reads the types and listed values of an argument from its JSON schema.

It reads `type`, `enum`, `const`, `anyOf`, `oneOf`, `allOf`, references within the schema, and OpenAPI's `nullable`.
Everything else is ignored, such as the schemas of nested values. Schemas come from data files and agents, so parts that
are malformed, unknown or refer to themselves are ignored, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import and_, or_
from typing import Any, TypeVar, cast

Kinds = frozenset[str]

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
ANY: Kinds = frozenset(_TYPES)
_OF_STRINGS = ("pattern", "minLength", "maxLength", "contentEncoding")
_COMPOSING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
"""The keywords of a schema that has parts."""
_NUMERIC_FORMATS = ("int32", "int64", "float", "double")
"""The formats of OpenAPI for numbers; all others are for strings."""
_NOTHING: Mapping[str, Any] = {"const": object()}
"""The schema `false`, which accepts no value."""
_MOST_REFERENCES = 256
"""The maximum number of references that are followed; further references are ignored."""

Said = TypeVar("Said", bool, Kinds)


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments, which may be a reference itself."""
    root = function.get("parameters")
    found, seen = root, set[str]()
    while isinstance(found, Mapping) and isinstance(ref := found.get("$ref"), str) and ref not in seen:
        seen.add(ref)
        found = _target(ref, root)
    return found if isinstance(found, Mapping) else {}


def may_have(name: str, function: Mapping[str, Any]) -> bool:
    """True if a call may have the argument `name` although it is not among the `properties` of `parameters_of`: the
    schema or one of its parts takes any argument, or a part describes this one."""
    whole = parameters_of(function)
    if whole.get("additionalProperties") is False:
        return False
    parts = _parts(whole, function.get("parameters"))
    return any(part.get("additionalProperties") or name in _as_mapping(part.get("properties")) for part in parts)


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _parts(whole: Mapping[str, Any], root: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and everything that it is composed of, each once."""
    waiting: list[Any] = [whole]
    seen = set[int]()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(ref := part.get("$ref"), str):
            waiting.append(_target(ref, root))
        for key in ("allOf", "anyOf", "oneOf"):
            waiting.extend(each if isinstance(each := part.get(key), list | tuple) else ())


def kinds_of(schema: Any, function: Mapping[str, Any]) -> Kinds:
    """The types that a value may have by the schema; ANY if the schema names no type.

    If the schema names no type, but has a keyword that applies only to strings, such as `pattern`, the type is string.
    """
    return _fold(schema, function.get("parameters"), _kinds_here, {}) or ANY


def admits(schema: Any, value: Any, function: Mapping[str, Any]) -> bool:
    """True if `schema`, which is for a parameter of `function`, takes the value."""

    def here(part: Mapping[str, Any]) -> bool:
        if value is None and part.get("nullable") is True:
            return True
        return _is(value, _named(part)) and (_values(part) is None or _lists(part, value))

    return _fold(schema, function.get("parameters"), here, {}) is not False


def lists(schema: Any, value: Any, function: Mapping[str, Any]) -> bool:
    """True if `schema` lists the value in an `enum` or a `const`."""
    return any(_same(each, value) for each in _listed(schema, function.get("parameters"), set()))


def problem_of(schema: Any, value: Any, function: Mapping[str, Any]) -> str:
    """The fault of the value of an argument; empty if there is none."""
    if schema is False:
        return "must be left out"
    if admits(schema, value, function):
        return ""
    kinds = kinds_of(schema, function)
    listed = [*_listed(schema, function.get("parameters"), set())]
    if not listed or not _is(value, kinds):
        return f"must be of type {_shown(kinds)}"
    # One part of `anyOf` may list values, while another part accepts all values of a type.
    unlisted = _fold(schema, function.get("parameters"), _unlisted_kinds_here, {}) or Kinds()
    whole = f"of type {_shown(unlisted)}, or " if unlisted else ""
    return f"must be {whole}one of {json.dumps(listed)}"


def _shown(kinds: Kinds) -> str:
    return " or ".join(kind for kind in _TYPES if kind in kinds and not (kind == "integer" and "number" in kinds))


def _fold(schema: Any, root: Any, here: Callable[[Mapping[str, Any]], Said], known: dict[str, Any]) -> Said | None:
    """Combine the results of `here` for all parts of a schema. None if no part gives a result.

    The results of parts that must all hold are combined by `&`, those of choices by `|`. `known` caches the results of
    references.
    """
    if isinstance(schema, bool):
        schema = {} if schema else _NOTHING
    if not isinstance(schema, Mapping):
        return None
    if schema.keys().isdisjoint(_COMPOSING):
        return here(schema)
    parts: list[Said | None] = [here(schema)]
    if isinstance(ref := schema.get("$ref"), str) and len(known) < _MOST_REFERENCES:
        if ref not in known:
            known[ref] = None
            known[ref] = _fold(_target(ref, root), root, here, known)
        elif known[ref] is None:
            return None
        parts.append(known[ref])
    parts += [_fold(each, root, here, known) for each in _schemas(schema, "allOf")]
    for key in ("anyOf", "oneOf"):
        said = [_fold(each, root, here, known) for each in _schemas(schema, key)]
        if choices := [each for each in said if each is not None]:
            parts.append(reduce(cast("Callable[[Said, Said], Said]", or_), choices))
    return reduce(cast("Callable[[Said, Said], Said]", and_), [each for each in parts if each is not None])


def _unlisted_kinds_here(part: Mapping[str, Any]) -> Kinds:
    """The types of a part that lists no values."""
    return _kinds_here(part) if _values(part) is None else Kinds()


def _kinds_here(part: Mapping[str, Any]) -> Kinds:
    kinds = _named(part)
    if (values := _values(part)) is not None:
        kinds = kinds.intersection(kind for value in values for kind in _kind(value))
    elif kinds == ANY and _is_of_strings(part):
        kinds = frozenset({"string"})
    return kinds | {"null"} if part.get("nullable") is True else kinds


def _named(part: Mapping[str, Any]) -> Kinds:
    named = part.get("type")
    named = [named] if isinstance(named, str) else named
    if (
        not isinstance(named, (list, tuple))
        or not named
        or not all(isinstance(each, str) and each in _TYPES for each in named)
    ):
        return ANY
    return frozenset(named) | ({"integer"} if "number" in named else set())


def _is_of_strings(part: Mapping[str, Any]) -> bool:
    format = part.get("format")
    if any(key in part for key in ("$ref", "allOf", "anyOf", "oneOf")):
        return False
    return any(key in part for key in _OF_STRINGS) or (isinstance(format, str) and format not in _NUMERIC_FORMATS)


def _values(part: Mapping[str, Any]) -> list[Any] | None:
    """The values that one part lists. None if it lists no values."""
    if "const" in part:
        return [part["const"]]
    listed = part.get("enum")
    return listed if isinstance(listed, list) and listed else None


def _lists(part: Mapping[str, Any], value: Any) -> bool:
    return any(_same(each, value) for each in _values(part) or ())


def _listed(schema: Any, root: Any, seen: set[str]) -> Iterator[Any]:
    """All values that a schema lists, itself or through the schemas to which it refers."""
    if not isinstance(schema, Mapping):
        return
    yield from _values(schema) or ()
    for key in ("allOf", "anyOf", "oneOf"):
        for each in _schemas(schema, key):
            yield from _listed(each, root, seen)
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref not in seen and len(seen) < _MOST_REFERENCES:
        seen.add(ref)
        yield from _listed(_target(ref, root), root, seen)


def _schemas(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _target(ref: str, root: Any) -> Any:
    """The schema at a JSON pointer such as `#/$defs/Mode`. None if the pointer leads nowhere."""
    start, *names = ref.split("/")
    found = root if start == "#" else None
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _kind(value: Any) -> list[str]:
    """The narrowest type of a value, in a list; empty if the value is not JSON."""
    return [kind for kind in _TYPES if _is(value, frozenset({kind}))][:1]


def _is(value: Any, kinds: Kinds) -> bool:
    """True if a value has one of the types. Unlike in Python, True and False are not numbers."""
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES[kind]) for kind in kinds)


def _same(listed: Any, value: Any) -> bool:
    return bool(listed == value) and isinstance(listed, bool) == isinstance(value, bool)
