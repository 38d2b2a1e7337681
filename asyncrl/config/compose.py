"""Turns KEY=VALUE words into a checked configuration: Hydra composes the files, and the schema adds the types.

There are three levels, and a later one wins: the schema's defaults, the chosen files (algorithm, engine, scoring,
experiment), the words of the command line. One error lists all mistakes, with a line for each key.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf

from asyncrl.config.files import GROUPS, config_dir
from asyncrl.config.group_files import ENDINGS, FAILURES, GroupFiles, reason
from asyncrl.config.keys import OPTIONS
from asyncrl.config.option import REQUIRED
from asyncrl.config.refusals import missing_data, refusals
from asyncrl.config.schema import TrainConfig
from asyncrl.config.secrets import shown_word
from asyncrl.config.setting import set_value, typed_defaults
from asyncrl.errors import ConfigError

DEFAULTS = "train"
"""The file that names the default file of each group."""


def read(words: Sequence[str], folder: Path | None = None, names_missing_data: bool = True) -> TrainConfig:
    """The typed and checked configuration of the KEY=VALUE `words`. `folder` holds further files of groups.

    With `names_missing_data`, an error also lists data files that do not exist. Raises ConfigError with one line for
    each mistake.
    """
    config, wrong = _composed(words, folder)
    # If the file of an experiment cannot be used, the values that seem to be missing may be in this file.
    is_whole = not any(key == "experiment" or key.endswith(ENDINGS) for key in wrong)
    unset: dict[str, str] = {}
    if wrong or not _is_whole(config):
        for key, option in OPTIONS.items():
            if key not in wrong and (line := _unset(config, key)):
                unset[key] = line
            if key in wrong or key in unset:
                OmegaConf.update(config, key, option.default, merge=False)
        for key in OmegaConf.missing_keys(config):
            OmegaConf.update(config, key, [] if get_origin(OPTIONS[key].type) is list else "")
    typed = OmegaConf.to_object(config)
    assert isinstance(typed, TrainConfig)
    bad = wrong | unset
    if lines := [*(bad if is_whole else wrong).values(), *refusals(typed, bad, combinations=is_whole)]:
        # If nothing else is wrong, the preflight reports missing files, together with other missing things.
        missing = missing_data(typed.data, typed.algorithm.sft.path) if names_missing_data else {}
        lines += (line for key, line in missing.items() if key not in bad)
        raise ConfigError("\n".join(lines))
    return typed


def composed(words: Sequence[str], folder: Path | None = None) -> DictConfig:
    """The typed configuration without checks: required keys may be missing, and values may break their constraints.

    Raises ConfigError with one line for each unusable key or word.
    """
    config, wrong = _composed(words, folder)
    if wrong:
        raise ConfigError("\n".join(wrong.values()))
    return config


_HYDRA = threading.Lock()
"""Hydra has one state for the whole process. So only one thread at a time may compose."""


def _composed(words: Sequence[str], folder: Path | None) -> tuple[DictConfig, dict[str, str]]:
    """Compose all usable words. Also return a mapping from the key of each unusable word to an error line.

    Raises ConfigError: a file cannot be used.
    """
    wrong: dict[str, str] = {}
    chosen: dict[str, str | None] = {}
    settings: list[tuple[str, Any]] = []
    with _HYDRA, GroupFiles(folder) as files:
        for word in words:
            key = word.lstrip("+").partition("=")[0]
            try:
                if key.endswith(ENDINGS):  # `asyncrl train first.yaml`
                    chosen["experiment"] = files.choose("experiment", word)
                    continue
                value = parsed(word).value()
                if key in GROUPS:
                    chosen[key] = files.choose(key, value)
                else:
                    settings.append((key, value))
            except ConfigError as error:
                wrong[key] = str(error)
        if files.wrong:
            config, in_files = typed_defaults(), files.wrong
        else:
            names = tuple((group, name) for group, name in chosen.items() if name)
            of_files = (_of_files if files.others else _of_shipped_files)(config_dir(), names)
            config, in_files = copy.deepcopy(of_files.config), of_files.wrong
            if "engine.kind" not in (key for key, _ in settings):
                wrong |= of_files.overruled
    for key, value in settings:
        wrong |= set_value(config, key, value)
    if in_files:
        raise ConfigError("\n".join([*wrong.values(), *in_files]))
    return config, wrong


class _OfFiles(NamedTuple):
    """The configuration that files alone make.

    - `config`: the configuration
    - `overruled`: the result of `_overruled_engine`
    - `wrong`: an error line for each value that cannot be used
    """

    config: DictConfig
    overruled: dict[str, str]
    wrong: list[str]


def _of_files(shipped: Path, names: tuple[tuple[str, str], ...]) -> _OfFiles:
    """Compose the default files and the named ones."""
    config, overruled = typed_defaults(), dict[str, str]()
    try:
        # Hydra composes the files without types, so that a part of the algorithm can be given by its name alone.
        with initialize_config_dir(str(shipped), version_base="1.3"):
            content = compose(DEFAULTS, [f"{group}={name}" for group, name in names])
            overruled = _overruled_engine(dict(names), content)
        return _OfFiles(config, overruled, list(set_value(config, "", OmegaConf.to_container(content)).values()))
    except FAILURES as error:
        return _OfFiles(config, overruled, [reason(error)])


# Cached, because composition takes most of the time of `read`, and a process that reads many configurations needs few
# different combinations of files.
_of_shipped_files = cache(_of_files)


def _overruled_engine(chosen: Mapping[str, str], content: DictConfig) -> dict[str, str]:
    """Map the key `engine` to an error line if `engine=NAME` was given, and the experiment's file sets another
    engine.kind, which would win. Otherwise return an empty mapping."""
    name = chosen.get("engine")
    if not name or not chosen.get("experiment"):
        return {}
    alone = OmegaConf.select(compose(DEFAULTS, [f"engine={name}"]), "engine.kind")
    kind = OmegaConf.select(content, "engine.kind")
    if kind == alone:
        return {}
    return {
        "engine": f"engine={name}: the experiment's file sets engine.kind={kind}, which wins over a chosen file; write "
        f"engine.kind={alone}"
    }


_LAST_COMMA = re.compile(r",\s*[\]}]")


def parsed(word: str) -> Override:
    """Parse a word by Hydra's grammar. Raises ConfigError: it is not of the form KEY=VALUE."""
    if word.startswith("~"):
        raise ConfigError(f"{shown_word(word)}: a key cannot be removed; set it to another value")
    if "=" not in word or word.startswith("="):
        raise ConfigError(f"{shown_word(word)}: write KEY=VALUE")
    try:
        override = OverridesParser.create().parse_override(word)
    except FAILURES as error:
        said = shown_word(word)
        # Hydra's own message quotes the word, so it is left out if the word contains a secret.
        why = f" ({reason(error)})" if said == word else ""
        quote = "quote a value that has special characters, as in \"NAME='VALUE'\" or \"NAME=['VALUE']\""
        comma = "a list or mapping has a comma after its last value: take this comma out"
        mend = comma if _LAST_COMMA.search(word) else quote
        raise ConfigError(f"{said}: it cannot be read{why}; {mend}") from error
    if override.is_sweep_override():
        raise ConfigError(
            f"{shown_word(word)}: give one value; write a list as [a,b], and quote a text that has a comma"
        )
    return override


def _is_whole(config: DictConfig) -> bool:
    """True if each option has a value."""
    try:
        OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except FAILURES:
        return False
    return True


def _unset(config: DictConfig, key: str) -> str | None:
    """The reason why an option has no value: it is not set, or refers to a missing key. `None` if it has a value."""
    try:
        value = OmegaConf.select(config, key, throw_on_missing=True)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue:
        if OPTIONS[key].default != REQUIRED:
            return f"{key}: it must be {OPTIONS[key].allowed}"
        return f"{key}: set it on the command line ({key}=VALUE) or in the file of an experiment"
    except FAILURES as error:
        return f"{key}: {reason(error)}"
    return None
