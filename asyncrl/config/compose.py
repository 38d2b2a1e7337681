"""From KEY=VALUE words to a checked configuration: Hydra composes it, the schema types it.

Three levels, the later wins: the schema's defaults, the chosen files (algorithm, engine, scoring, experiment), the
words of the command line. All that is wrong is refused at once, one line for each key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from asyncrl.config.checks import refusals
from asyncrl.config.files import GROUPS, choices, config_dir
from asyncrl.config.keys import OPTIONS, SECTIONS, did_you_mean, option_of
from asyncrl.config.option import REQUIRED, as_yaml
from asyncrl.config.renamed import advice
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError

DEFAULTS = "train"
"""The file that names the schema and the file of each group that is taken unless another is chosen."""

FAILURES = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError)
"""What Hydra, OmegaConf and YAML raise for words and files that they cannot use."""

PACKAGE = re.compile(r"#\s*@package\s+(\S+)")


def read(words: Sequence[str], folder: Path | None = None) -> TrainConfig:
    """The typed and checked configuration that `words` (KEY=VALUE) choose; `folder` has further files of groups.

    Raises ConfigError with one line for everything that is wrong.
    """
    config, wrong = _composed(words, folder)
    for key, option in OPTIONS.items():
        if key not in wrong and (line := _unset(config, key)):
            wrong[key] = line
        if key in wrong:
            OmegaConf.update(config, key, option.default, merge=False)
    for key in OmegaConf.missing_keys(config):
        OmegaConf.update(config, key, "")
    typed = OmegaConf.to_object(config)
    assert isinstance(typed, TrainConfig)
    if lines := [*wrong.values(), *refusals(typed, wrong)]:
        raise ConfigError("\n".join(lines))
    return typed


def composed(words: Sequence[str], folder: Path | None = None) -> DictConfig:
    """The same before it is checked: required keys may be missing, and values may break their constraints.

    Raises ConfigError with one line for each key and each word that cannot be used.
    """
    config, wrong = _composed(words, folder)
    if wrong:
        raise ConfigError("\n".join(wrong.values()))
    return config


def _composed(words: Sequence[str], folder: Path | None) -> tuple[DictConfig, dict[str, str]]:
    """The composition of all words that can be used; for each other word, by its key, the line that refuses it.

    Raises ConfigError: a file cannot be used.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--config-dir={folder}: there is no such folder")
    wrong: dict[str, str] = {}
    chosen: dict[str, str] = {}
    settings: list[str] = []
    scratch = OmegaConf.structured(TrainConfig)
    ConfigStore.instance().store(name="schema", node=scratch)  # It keeps a copy.
    for word in words:
        key, _, text = word.lstrip("+").partition("=")
        try:
            value = _parsed(word).value()
            if key in GROUPS:
                chosen[key] = _chosen(key, value, folder)
            elif refused := _refused(key, value, scratch):
                wrong |= refused
            else:
                settings.append(f"++{key}={text}")
        except ConfigError as error:
            wrong[key] = str(error)
    groups = {group: name for group, name in chosen.items() if name}
    in_files = [line for item in groups.items() for line in _refused_in_file(*item, folder, scratch)]
    if in_files:
        raise ConfigError("\n".join([*wrong.values(), *in_files]))
    search = [f"hydra.searchpath=['file://{folder.resolve()}']"] if folder else []
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            overrides = [*search, *(f"{group}={name}" for group, name in groups.items()), *settings]
            return compose(DEFAULTS, overrides), wrong
    except FAILURES as error:
        raise ConfigError("\n".join([*wrong.values(), _reason(error)])) from error


def _parsed(word: str) -> Override:
    """Raises ConfigError: the word is not of the form KEY=VALUE."""
    if word.startswith("~"):
        raise ConfigError(f"{word}: a key cannot be removed; set it to another value")
    if "=" not in word or word.startswith("="):
        raise ConfigError(f"{word}: write KEY=VALUE")
    try:
        override = OverridesParser.create().parse_override(word)
    except FAILURES as error:
        raise ConfigError(
            f"{word}: it cannot be read ({_reason(error)}); quote a value that has special characters, as in "
            "\"KEY='VALUE'\""
        ) from error
    if override.is_sweep_override():
        raise ConfigError(f"{word}: give one value; write a list as [a,b], and quote a text that has a comma")
    return override


def _chosen(group: str, name: Any, folder: Path | None) -> str:
    """The name of the file that is chosen; empty for none. Raises ConfigError: there is none, or there are two."""
    if name is None and group == "experiment":
        return ""
    known = choices(group, folder)
    if isinstance(name, dict):
        raise ConfigError(f"{group}: choose a file with {group}=NAME, and set keys one by one with {group}.KEY=VALUE")
    if str(name) not in known:
        hint = did_you_mean(str(name), known) or f"; use one of {', '.join(known)}"
        raise ConfigError(f"{group}={as_yaml(name)}: there is no such file{hint}")
    if folder is not None and str(name) in choices(group) and known[str(name)].is_relative_to(folder):
        raise ConfigError(f"{group}={name}: asyncrl has a file of this name; rename {known[str(name)]}")
    return str(name)


def _refused(key: str, value: Any, scratch: DictConfig) -> dict[str, str]:
    """A line for each key that cannot have its value, where `value` is set at `key`; they are tried on `scratch`."""
    if isinstance(value, dict) and (key in SECTIONS or not key):
        inner = [_refused(f"{key}.{name}".lstrip("."), each, scratch) for name, each in value.items()]
        return {each: line for lines in inner for each, line in lines.items()}
    shown, option = f"{key}={as_yaml(value)}", option_of(key)
    if instead := advice(key):
        return {key: f"{shown}: {instead}"}
    if key in SECTIONS and key not in OPTIONS:
        first = next(each for each in OPTIONS if each.startswith(f"{key}."))
        return {key: f"{shown}: set one of the keys below it, such as {first}"}
    if option is None:
        return {key: f"{shown}: there is no such key{did_you_mean(key, [*OPTIONS, *SECTIONS, *GROUPS])}"}
    try:
        OmegaConf.update(scratch, key, value, force_add=True)
    except InterpolationResolutionError:
        return {}  # Another key may be set later; `_unset` finds those that are not.
    except OmegaConfBaseException:
        return {key: f"{shown}: it must be {option.allowed}"}
    return {}


def _refused_in_file(group: str, name: str, folder: Path | None, scratch: DictConfig) -> list[str]:
    """A line for each key of a file that cannot have its value."""
    path = choices(group, folder)[name]
    try:
        text = path.read_text()
        content = OmegaConf.to_container(OmegaConf.load(path))
    except FAILURES as error:
        return [f"{path}: it cannot be read as YAML: {_reason(error)}"]
    if not isinstance(content, dict):
        return [f"{path}: it must hold KEY: VALUE lines"]
    found = PACKAGE.search(text)
    package = found[1] if found else group
    if group == "experiment" and package != "_global_":
        return [f"{path}: begin the file of an experiment with the line `# @package _global_`"]
    content.pop("defaults", None)
    refused = _refused(package.removeprefix("_global_"), content, scratch)
    return [f"{path}: {line}" for line in refused.values()]


def _unset(config: DictConfig, key: str) -> str | None:
    """Why an option has no value: nothing set it, or it refers to something that does not exist."""
    try:
        value = OmegaConf.select(config, key, throw_on_missing=True)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue:
        if OPTIONS[key].default != REQUIRED:
            return f"{key}: it must be {OPTIONS[key].allowed}"
        return f"{key}: set it on the command line ({key}=VALUE) or in the file of an experiment"
    except FAILURES as error:
        return f"{key}: {_reason(error)}"
    return None


def _reason(error: Exception) -> str:
    """The beginning of another library's message, in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(
        line for line in lines[:4] if line and not line.startswith(("See http", "full_key", "object_type"))
    )
