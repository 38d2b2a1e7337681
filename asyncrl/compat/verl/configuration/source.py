"""Reads a configuration of verl: a YAML file or the words of a script, with verl's defaults for all other keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from asyncrl.compat.verl.configuration.config_files import config_names, find_config, is_of_verl, read_config
from asyncrl.compat.verl.configuration.recipes import recipe_named
from asyncrl.compat.verl.configuration.references import MISSING, References, UnknownValue
from asyncrl.compat.verl.configuration.script import (
    NOT_NAMED,
    NamedConfig,
    ScriptWord,
    expanded_word,
    script_configuration,
)
from asyncrl.compat.verl.configuration.sections import Section, leaves, set_key, written_at
from asyncrl.compat.yaml_files import MAX_VALUES, read_small
from asyncrl.config.group_files import FAILURES, reason
from asyncrl.config.keys import did_you_mean
from asyncrl.errors import ConfigError

HOME = "~/"
"""The beginning of verl's default paths: files and models that verl's authors have in their home folders."""
OF_SCRIPT = "only the running script knows this value"
NOT_SET = "the environment does not set this variable"


class VerlConfig:
    """The values of a configuration of verl, with verl's defaults.

    - `values`: the value of every key: the given value, or verl's default
    - `given`: the keys that the file or a word KEY=VALUE sets
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
        self.given = [key for key, _ in leaves(given) if key in self.values]

    def __getitem__(self, key: str) -> Any:
        """The value of a key, or verl's default if the value is null."""
        value = self.values.get(key)
        return self._defaults.get(key) if value is None else value

    def says(self, key: str) -> bool:
        """True if the file or a word gives the key a value."""
        return key in self.given and self.values[key] is not None

    def below(self, section: str) -> dict[str, Any]:
        """Map each given key of a section, without the section's name, to its value."""
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
                    # The user has given a path. A run must not start with a path of verl's authors instead.
                    self._defaults[key] = default = None
                self.remarks.append(remark if default is None else f"{remark}, or verl's default {default} counts")
                continue
            if isinstance(value, Mapping) and value:
                yield from self._leaves(value, f"{key}.")
            else:
                yield key, None if value == MISSING else value


def _check_number(value: Any, default: Any) -> None:
    """Raises ValueError: verl's default is a number, but `value` is set and is not a number."""
    if value is None or value == MISSING or type(default) not in (int, float) or isinstance(value, int | float):
        return
    try:
        # A threshold may have a lower and an upper value: 0.5_5.0.
        for part in value.split("_"):
            float(part)
    except (ValueError, AttributeError) as error:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise ValueError(f"it is {value!r:.50}, and must be {kind}") from error


def read_verl(file: Path | None, words: Sequence[str], environment: Mapping[str, str]) -> Section:
    """The configuration in a file (YAML or .sh), changed by words (KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY).

    Later words win. Raises ConfigError: the file or a word cannot be read.
    """
    return read_noting(file, words, environment)[0]


def read_noting(
    file: Path | None, words: Sequence[str], environment: Mapping[str, str], named: NamedConfig = NOT_NAMED
) -> tuple[Section, list[str]]:
    """The configuration as `read_verl` reads it, and lines about what may be missing from it: one for each file that it
    names but that does not exist, and one for each command of a script that may have been read wrongly.

    `named` has Hydra's options of the command line, which replace those of a script. Raises ConfigError: the file or a
    word cannot be read, or the file of `named` does not exist.
    """
    given, missing = Section(), list[str]()
    try:
        if file is not None and file.suffix == ".sh":
            script = script_configuration(read_small(file), environment)
            bases = [Path(), file.parent]
            given, missing = _read_named(named, bases) if named.name else _read_if_there(script.named, bases)
            missing += script.remarks
            for each in script.words:
                _apply(given, each, OF_SCRIPT)
        elif file is not None and named.name is not None:
            raise ConfigError(f"{file}, --config-name={named.name}: name one configuration file")
        elif file is not None:
            given, missing = read_config(file)
        else:
            given, missing = _read_named(named, [Path()])
    except FAILURES as error:
        raise ConfigError(f"{file}: it cannot be read: {reason(error)}") from error
    for word in words:
        _apply(given, expanded_word(word, environment), NOT_SET)
    return given, missing


def _read_if_there(named: NamedConfig, bases: Sequence[Path]) -> tuple[Section, list[str]]:
    """The file that a script names. If there is no such file, return an empty configuration and a line that says so: a
    script may be translated on a machine that lacks its files."""
    try:
        return _read_named(named, bases)
    except ConfigError as error:
        return {}, [
            f"Not read: {error}. Its keys are missing below: start from-verl with --config-path=FOLDER "
            "--config-name=NAME, or translate the YAML that verl prints with --cfg job"
        ]


def _read_named(named: NamedConfig, bases: Sequence[Path]) -> tuple[Section, list[str]]:
    """The file that Hydra's options name. Its folder is relative to one of `bases`. Raises ConfigError: there is no
    such file."""
    if named.name is None:
        return {}, []
    folders = [base / Path(named.folder).expanduser() if named.folder else base for base in bases]
    folders += bases[1:]
    if (file := find_config(named.name, folders)) is not None:
        return read_config(file)
    if is_of_verl(named.name):
        return recipe_named(named.name), []
    where = f" in {named.folder}" if named.folder else ""
    near = did_you_mean(named.name, config_names(folders))
    raise ConfigError(f"--config-name={named.name}: there is no such file{where}{near}")


def _apply(given: Section, read: ScriptWord, reason: str) -> None:
    """Apply a word. If its value is not known (`ScriptWord.is_known` is false), `reason` says why."""
    word = read.text
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
        value = OverridesParser.create().parse_override(word).value() if read.is_known else UnknownValue(text, reason)
    except FAILURES:
        value = text  # A path with special characters, for example.
    set_key(given, key, value)


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
