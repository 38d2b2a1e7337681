"""A configuration of verl: its YAML file or a script's words, with verl's defaults for what neither names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from asyncrl.compat.verl.configuration.script import script_words
from asyncrl.config.group_files import FAILURES, reason
from asyncrl.errors import ConfigError


class VerlConfig:
    """What a configuration says, with verl's defaults. Raises ConfigError: a section is a list.

    `values` has every key with its value, verl's defaults too; `given` those that the file and the words name.
    `remarks` has a line for each value that cannot be read."""

    def __init__(self, given: DictConfig, defaults: Mapping[str, Any]) -> None:
        config: DictConfig | ListConfig = OmegaConf.create({})
        for key, value in defaults.items():
            OmegaConf.update(config, key, value, force_add=True)
        try:
            config = OmegaConf.merge(config, given)
        except OmegaConfBaseException as error:
            raise ConfigError(f"a section of verl's configuration is none: {reason(error)}") from error
        assert isinstance(config, DictConfig)
        self.remarks: list[str] = []
        self._defaults = defaults
        self.values = dict(self._leaves(config, ""))
        written = OmegaConf.to_container(given, resolve=False)
        assert isinstance(written, dict)
        self.given = [key for key in _names(written, "") if key in self.values]

    def __getitem__(self, key: str) -> Any:
        """The value, or verl's default where it is null."""
        value = self.values.get(key)
        return self._defaults.get(key) if value is None else value

    def says(self, key: str) -> bool:
        """Whether the file or a word gives the key a value."""
        return key in self.given and self.values[key] is not None

    def below(self, section: str) -> dict[str, Any]:
        """The given keys below a section, by what follows its name."""
        prefix = f"{section}."
        return {key.removeprefix(prefix): self.values[key] for key in self.given if key.startswith(prefix)}

    def _leaves(self, node: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
        for name in node:
            key = prefix + str(name)
            try:
                value = node[name]
                value = value if isinstance(value, DictConfig) else _plain(value)
            except MissingMandatoryValue:
                value = None
            except OmegaConfBaseException as error:
                self.remarks.append(
                    f"{key}: its value cannot be read ({reason(error)}), and is left out: give {key}=VALUE"
                )
                continue
            if isinstance(value, DictConfig) and value:
                yield from self._leaves(value, f"{key}.")
            else:
                yield key, {} if isinstance(value, DictConfig) else value


def read_verl(file: Path | None, words: Sequence[str], environment: Mapping[str, str]) -> DictConfig:
    """What a file (YAML, or a script that ends in .sh) and words (KEY=VALUE, also with + or ++; ~KEY) say; later words
    win. Raises ConfigError: something cannot be read."""
    given: Any = OmegaConf.create({})
    try:
        if file is not None and file.suffix == ".sh":
            words = [*script_words(file.read_text(), environment), *words]
        elif file is not None:
            given = OmegaConf.load(file)
    except FAILURES as error:
        raise ConfigError(f"{file}: it cannot be read: {reason(error)}") from error
    if not isinstance(given, DictConfig):
        raise ConfigError(f"{file}: it must hold KEY: VALUE lines, as verl's ppo_trainer.yaml does")
    for word in words:
        _apply(given, word)
    return given


def _apply(given: DictConfig, word: str) -> None:
    if word.startswith("~"):
        section, _, name = word[1:].partition("=")[0].rpartition(".")
        node = OmegaConf.select(given, section) if section else given
        if isinstance(node, DictConfig):
            node.pop(name, None)
        return
    key, sign, text = word.lstrip("+").partition("=")
    if not sign or not key:
        raise ConfigError(f"{word}: write KEY=VALUE")
    try:
        value = OverridesParser.create().parse_override(word).value()
    except FAILURES:
        value = text  # A path with special characters, for example.
    try:
        OmegaConf.update(given, key, value, force_add=True)
    except FAILURES as error:
        raise ConfigError(f"{word}: it cannot be set: {reason(error)}") from error


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _names(node: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    """The keys that a configuration gives, without sections."""
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
