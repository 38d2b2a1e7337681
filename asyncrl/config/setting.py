"""Sets one key of a composed configuration. If the key cannot have the value, an error line tells why."""

from __future__ import annotations

import copy
import difflib
import re
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from asyncrl.config import other_words
from asyncrl.config.files import GROUPS
from asyncrl.config.keys import MISSPELT, OPTIONS, SECTIONS, did_you_mean, option_of, sections
from asyncrl.config.option import Option
from asyncrl.config.schema import LoraConfig, PartConfig, TrainConfig
from asyncrl.config.secrets import shown

ADAPTERS = tuple(prefix.rstrip(".") for prefix, section in sections(TrainConfig()) if isinstance(section, LoraConfig))
"""The sections of adapters."""


@cache
def _typed_once() -> DictConfig:
    return OmegaConf.structured(TrainConfig)  # type: ignore[no-any-return]


def typed_defaults() -> DictConfig:
    """A new configuration with the schema's types and defaults. It is a copy of a cached one, because copying takes a
    sixth of the time that building takes."""
    return copy.deepcopy(_typed_once())


def set_value(config: DictConfig, key: str, value: Any) -> dict[str, str]:
    """Set `value` at `key`. Returns an error line for each key that cannot have its value."""
    if isinstance(value, dict) and (key in SECTIONS or not key):
        inner = [set_value(config, f"{key}.{name}".lstrip("."), each) for name, each in value.items()]
        return {each: line for lines in inner for each, line in lines.items()}
    if _without_adapters(key, value):
        OmegaConf.update(config, key.removesuffix(".rank"), LoraConfig(), merge=False)
        return {}
    said, option = shown(key, value), option_of(key)
    if key in SECTIONS and key not in OPTIONS:
        first = next(each for each in OPTIONS if each.startswith(f"{key}."))
        return {key: f"{said}: set one of the keys below it, such as {first}"}
    if option is None:
        return {key: f"{said}: there is no such key{_hint(key, value)}"}
    try:
        full = _in_full(option, value) if key in OPTIONS else value
        OmegaConf.update(config, key, full, merge=not is_dataclass(full), force_add=True)
    except InterpolationResolutionError:
        return {}  # The referenced key may be set later. If it is never set, `compose.read` refuses `key`.
    except OmegaConfBaseException:
        return {key: f"{said}: it must be {option.allowed}"}
    return {}


def _without_adapters(key: str, value: Any) -> bool:
    """True for `lora=null` and `lora.rank=0` of a model, which also undo the other values of its adapters."""
    return value is None if key in ADAPTERS else key.removesuffix(".rank") in ADAPTERS and value == 0


def _hint(key: str, value: Any) -> str:
    """A text with the key that was meant: the list of an element, a key with almost the same spelling, or else our key
    for a word of another system."""
    known = [*OPTIONS, *SECTIONS, *GROUPS]
    if (element := re.search(r"\.\d+(\.|$)", key)) and (whole := key[: element.start()]) in OPTIONS:
        return f"; set {whole} as a whole"
    if difflib.get_close_matches(key, known, 1, MISSPELT):
        return did_you_mean(key, known)
    hint = other_words.hint(key, value) or did_you_mean(key, known)
    end = " " if hint.endswith("?") else "; "
    return f"{hint}{end}`asyncrl from-verl` translates keys of verl" if other_words.is_of_verl(key) else hint


def _in_full(option: Option, value: Any) -> Any:
    """Expand short forms. The name of a part of the algorithm becomes the part with its defaults, and a single item
    becomes a list of one."""
    if not value or (isinstance(value, str) and "${" in value):
        return value
    if get_origin(option.type) is list and not isinstance(value, int | float):
        values, (each,) = value if isinstance(value, list) else [value], get_args(option.type)
        return [{"name": one} if is_dataclass(each) and isinstance(one, str) else one for one in values]
    return PartConfig(value) if option.type is PartConfig and isinstance(value, str) else value
