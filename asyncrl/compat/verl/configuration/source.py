"""Reads a configuration of verl: a YAML file or the words of a script, with verl's defaults for all other keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from asyncrl.compat.verl.configuration.references import MISSING, References, UnknownValue
from asyncrl.compat.verl.configuration.script import script_words
from asyncrl.compat.yaml_files import MAX_VALUES, read_small, read_yaml
from asyncrl.config.group_files import FAILURES, reason
from asyncrl.errors import ConfigError

HOME = "~/"
"""The beginning of verl's default paths: files and models that verl's authors have in their home folders."""
Section = dict[str, Any]
"""Keys with plain values. References are unresolved. A value that only a running script knows is an UnknownValue."""


class VerlConfig:
    """The values of a configuration of verl, with verl's defaults.

    - `values`: the value of every key, also of keys with a default
    - `given`: the keys that the file and the words set
    - `remarks`: a line for each value that cannot be read

    Raises ConfigError: a section is a list, or there are more than MAX_VALUES values.
    """

    def __init__(self, given: Section, defaults: Mapping[str, Any]) -> None:
        whole = _with_defaults(given, defaults)
        self.remarks: list[str] = []
        self._defaults = dict(defaults)
        self._references = References(whole)
        self.values: dict[str, Any] = {}
        for key, value in self._leaves(whole, ""):
            if len(self.values) >= MAX_VALUES:
                raise ConfigError(f"verl's configuration has more than {MAX_VALUES} values")
            self.values[key] = value
        self.given = [key for key in _names(given, "") if key in self.values]

    def __getitem__(self, key: str) -> Any:
        """The value of a key, or verl's default if the value is null."""
        value = self.values.get(key)
        return self._defaults.get(key) if value is None else value

    def says(self, key: str) -> bool:
        """True if the file or a word gives the key a value."""
        return key in self.given and self.values[key] is not None

    def below(self, section: str) -> dict[str, Any]:
        """The given keys below a section, without the section's name."""
        prefix = f"{section}."
        return {key.removeprefix(prefix): self.values[key] for key in self.given if key.startswith(prefix)}

    def _leaves(self, section: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, written in section.items():
            key = f"{prefix}{name}"
            default = self._defaults.get(key)
            try:
                value = written if isinstance(written, Mapping) else self._references.resolved(written, key)
                _check_number(value, default)
            except (ValueError, RecursionError, yaml.YAMLError) as error:
                remark = f"{key}: its value cannot be read ({error}), and is left out: give {key}=VALUE"
                if str(default).startswith(HOME):
                    # The user has a path of their own. A run must not start with a path of verl's authors instead.
                    self._defaults[key] = default = None
                self.remarks.append(remark if default is None else f"{remark}, or verl's default {default} counts")
                continue
            if isinstance(value, Mapping) and value:
                yield from self._leaves(value, f"{key}.")
            else:
                yield key, None if value == MISSING else value


def _check_number(value: Any, default: Any) -> None:
    """Raises ValueError: verl's default is a number, and the value is a text."""
    if isinstance(value, str) and value != MISSING and type(default) in (int, float):
        # A threshold may have a lower and an upper value: 0.5_5.0.
        for part in value.split("_"):
            float(part)


def read_verl(file: Path | None, words: Sequence[str], environment: Mapping[str, str]) -> Section:
    """The configuration in a file (YAML or .sh), changed by words (KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY).

    Later words win. Raises ConfigError: the file or a word cannot be read.
    """
    given: Any = {}
    try:
        if file is not None and file.suffix == ".sh":
            for word, is_known in script_words(read_small(file), environment):
                _apply(given, word, is_known)
        elif file is not None:
            given = read_yaml(file)
    except FAILURES as error:
        raise ConfigError(f"{file}: it cannot be read: {reason(error)}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{file}: it must hold KEY: VALUE lines, as verl's ppo_trainer.yaml does")
    for word in words:
        _apply(given, word)
    return given


def _apply(given: Section, word: str, is_known: bool = True) -> None:
    if word.startswith("~"):
        section, _, name = word[1:].partition("=")[0].rpartition(".")
        node = written_at(given, section) if section else given
        if isinstance(node, dict):
            node.pop(name, None)
        return
    key, sign, text = word.lstrip("+").partition("=")
    if not sign or not key:
        raise ConfigError(f"{word}: write KEY=VALUE")
    try:
        value = OverridesParser.create().parse_override(word).value() if is_known else UnknownValue(text)
    except FAILURES:
        value = text  # A path with special characters, for example.
    set_key(given, key, value)


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


def _with_defaults(given: Section, defaults: Mapping[str, Any]) -> Section:
    """The configuration with the defaults of missing keys. A section that is null or a reference gets no defaults."""
    whole = copy.deepcopy(given)
    for key, value in defaults.items():
        *sections, name = key.split(".")
        node: Any = whole
        for each in sections:
            node = node.setdefault(each, {}) if isinstance(node, dict) else node
        if isinstance(node, dict):
            node.setdefault(name, value)
        elif isinstance(node, list):
            raise ConfigError(f"verl's configuration has a list instead of the section of {key}")
    return whole


def _names(node: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    """The keys that a configuration gives, without sections."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
