"""Models by family: built in, or a class of yours by its dotted path.

A built-in family is a module with a dataclass `Params`, whose fields are the keys of the section's `params`, and
`load(config, params, key)`. A class of yours is called with its section of the configuration, and scores as
`ProcessRewardModel` or `OutcomeModel`. Families are imported only when they are named, and with them torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from asyncrl.config.imports import imported
from asyncrl.errors import ConfigError
from asyncrl.scoring.models.base import OutcomeModel, ProcessRewardModel

if TYPE_CHECKING:
    from asyncrl.config.schema import ScoringModelConfig

_LOCAL = ("value_head", "qwen_prm", "skywork_prm", "math_shepherd", "rlhflow", "prime")
PRM_FAMILIES: Mapping[str, str] = {**{name: name for name in _LOCAL}, "remote": "remote_prm"}
"""The module of each family in this package."""
OUTCOME_FAMILIES: Mapping[str, str] = {"sequence_classifier": "sequence_classifier", "remote": "remote_outcome"}


def load_prm(config: ScoringModelConfig, key: str) -> ProcessRewardModel:
    """The process reward model that the configuration has at `key`. Raises ConfigError, which says how to mend it."""
    model: ProcessRewardModel = _load(config, key, PRM_FAMILIES)
    return model


def load_outcome_model(config: ScoringModelConfig, key: str) -> OutcomeModel:
    """The outcome model that the configuration has at `key`. Raises ConfigError, which says how to mend it."""
    model: OutcomeModel = _load(config, key, OUTCOME_FAMILIES)
    return model


def check_prm(config: ScoringModelConfig, key: str) -> None:
    """Refuse a family that does not exist and parameters that it does not take, without loading. Raises ConfigError."""
    _find(config, key, PRM_FAMILIES)


def check_outcome_model(config: ScoringModelConfig, key: str) -> None:
    """As `check_prm`, for outcome models."""
    _find(config, key, OUTCOME_FAMILIES)


def _load(config: ScoringModelConfig, key: str, families: Mapping[str, str]) -> Any:
    found, params = _find(config, key, families)
    return found(config) if params is None else found.load(config, params, key)


def _find(config: ScoringModelConfig, key: str, families: Mapping[str, str]) -> tuple[Any, Any]:
    """A family's module and its parameters, or a user's class and None."""
    if config.family in families:
        module = importlib.import_module(f"{__package__}.{families[config.family]}")
        return module, _params(module.Params, config.params, f"{key}.params")
    return _imported(config.family, f"{key}.family={config.family}", families), None


def _imported(path: str, told: str, families: Mapping[str, str]) -> Any:
    if "." not in path:
        raise ConfigError(
            f"{told}: use one of {', '.join(families)}, or the dotted path of a class, such as my_models.MyPRM"
        )
    found = imported(path, told, "module.Class")
    if not callable(getattr(found, "score", None)):
        raise ConfigError(f"{told} is no model: it needs a `name` and a method `score(transcripts)`")
    return found


def _params(cls: Any, given: Mapping[str, Any], key: str) -> Any:
    known = {each.name: each.default for each in fields(cls)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{key}.{name}: this family has no such parameter; it takes {', '.join(known) or 'none'}")
        kinds = (int, float) if isinstance(known[name], float) else (type(known[name]),)
        if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(known[name], bool):
            raise ConfigError(f"{key}.{name}={value!r}: it must be like its default, {known[name]!r}")
    return cls(**given)
