"""Masks the secrets of a configuration: keys of services, tokens and passwords.

The field `secret` of an option tells which of its values are secrets. The roles read config.yaml in the run's folder,
so it is the only file that contains secrets. If it has any, only the file's owner can read it. Everything that is
printed, logged, recorded, exported or sent has `MASK` instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from asyncrl.config.keys import OPTIONS, option_of
from asyncrl.config.option import as_yaml
from asyncrl.masking import MASK, hidden, is_secret_name, masked_text
from asyncrl.masking import masked as masked_by_name

KEY_VALUE = re.compile(r"[+~]{0,2}[a-z][\w./@]*=")
"""The start of a KEY=VALUE word. It does not match environment variables, as in --export FOO=1."""
ALL_SECRET = tuple(key for key, option in OPTIONS.items() if option.secret == "all")


def masked(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A copy of a configuration with masked secrets. `values` may be nested, or flat with dotted keys."""
    return {
        name: masked(value, f"{prefix}{name}.")
        if isinstance(value, Mapping) and option_of(f"{prefix}{name}") is None
        else masked_value(f"{prefix}{name}", value)
        for name, value in values.items()
    }


def masked_value(key: str, value: Any) -> Any:
    """The value of a key with masked secrets. The key may be an entry of a mapping, or unknown."""
    option = option_of(key)
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if option is None:
        return hidden(plain) if _meant_a_secret(key) else masked_by_name(plain, key.rpartition(".")[2])
    if option.secret == "all":
        return hidden(plain)
    if option.secret == "none" or not option.holds_texts:
        return masked_text(plain) if isinstance(plain, str) else plain
    below = key.removeprefix(next(each for each in _prefixes(key) if each in OPTIONS)).removeprefix(".")
    return hidden(plain) if is_secret_name(below) else masked_by_name(plain, below.rpartition(".")[2])


def has_secrets(values: Mapping[str, Any]) -> bool:
    """True if a configuration contains secrets."""
    return masked(values) != values


def shown(key: str, value: Any) -> str:
    """The text KEY=VALUE with masked secrets."""
    return f"{key}={shown_value(key, value)}"


def shown_value(key: str, value: Any) -> str:
    """The value of a key as text, with masked secrets."""
    return as_yaml(masked_value(key, value))


def shown_word(word: str) -> str:
    """A word of a command line, KEY=VALUE or any other, with masked secrets."""
    key, equals, value = word.partition("=")
    if not equals:
        return masked_text(word)
    option = option_of(key.lstrip("+~"))
    if option is not None and option.holds_anything:
        # The value may be nested and contain secrets by name. The word may be only a fragment of it that cannot be
        # parsed, so all of it is masked.
        return f"{key}={MASK}"
    return f"{key}={masked_value(key.lstrip('+~'), value)}"


def shown_words(words: Sequence[str]) -> list[str]:
    """A command line with masked secrets."""
    return [shown_word(word) if KEY_VALUE.match(word) else word for word in masked_by_name(list(words))]


def _meant_a_secret(key: str) -> bool:
    """True if an unknown key resembles a key whose values are secrets, as in a typing error."""
    near = (difflib.get_close_matches(each, ALL_SECRET, 1) for each in _prefixes(key))
    return is_secret_name(key) or any(near)


def _prefixes(key: str) -> Iterator[str]:
    """The key and its parents, such as a.b.c, a.b and a."""
    while key:
        yield key
        key = key.rpartition(".")[0]
