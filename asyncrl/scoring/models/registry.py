"""Loads models by family: a built-in family, or the dotted path of your own class.

A built-in family is a module with a dataclass `Params`, whose fields are the keys of `params` in the configuration, and
a function `load(config, params, key)`. Your own class is called with its section of the configuration, and must return
a `RewardModel`. A family's module, and with it torch, is imported only when the configuration names the family.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from asyncrl.config.imports import imported
from asyncrl.config.option import options
from asyncrl.config.schema import OutcomeModelConfig, ScoringModelConfig
from asyncrl.errors import ConfigError
from asyncrl.machine.process import is_ctrl_c
from asyncrl.masking import masked
from asyncrl.plain import copied
from asyncrl.scoring.models.base import OutcomeModel, ProcessRewardModel
from asyncrl.text import reason_of

_LOCAL = ("value_head", "qwen_prm", "skywork_prm", "math_shepherd", "rlhflow", "prime")
PRM_FAMILIES: Mapping[str, str] = {**{name: name for name in _LOCAL}, "remote": "remote_prm"}
"""Maps each family of process reward models to its module in this package."""
OUTCOME_FAMILIES: Mapping[str, str] = {"sequence_classifier": "sequence_classifier", "remote": "remote_outcome"}


def load_prm(config: ScoringModelConfig) -> ProcessRewardModel:
    """The model that `scoring.prm` names. Raises ConfigError: the section is wrong, or the model cannot be loaded."""
    model: ProcessRewardModel = _load(config, "scoring.prm", PRM_FAMILIES)
    return model


def load_outcome_model(config: OutcomeModelConfig) -> OutcomeModel:
    """The model that `scoring.outcome_model` names. Raises ConfigError: see `load_prm`."""
    model: OutcomeModel = _load(config, "scoring.outcome_model", OUTCOME_FAMILIES)
    return model


def check_models(prm: ScoringModelConfig, outcome_model: OutcomeModelConfig) -> None:
    """Checks both families and their parameters without loading a model. Raises ConfigError: one of them is wrong."""
    _find(prm, "scoring.prm", PRM_FAMILIES)
    _find(outcome_model, "scoring.outcome_model", OUTCOME_FAMILIES)


def _load(config: ScoringModelConfig, key: str, families: Mapping[str, str]) -> Any:
    family, params = _find(config, key, families)
    if params is not None:
        return family.load(config, params, key)
    try:
        return family(copied(config))
    except Exception:
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(f"{key}.family={config.family} cannot be made: {reason_of(error)}") from error


def _find(config: ScoringModelConfig, key: str, families: Mapping[str, str]) -> tuple[Any, Any]:
    """A family's module and its parameters, or a user's class and None."""
    if config.family in families:
        module = importlib.import_module(f"{__package__}.{families[config.family]}")
        return module, _params(module.Params, config.params, f"{key}.params")
    setting = f"{key}.family={config.family}"
    if "." not in config.family:
        raise ConfigError(
            f"{setting}: use one of {', '.join(families)}, or the dotted path of a class, such as my_models.MyPRM"
        )
    users = imported(config.family, setting, "module.Class")
    if not callable(getattr(users, "score", None)):
        raise ConfigError(f"{setting} is not a reward model: it needs a `name` and a method `score(transcripts)`")
    return users, None


def _params(cls: Any, given: Mapping[str, Any], key: str) -> Any:
    known = {each.name: each for each in options(cls)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{key}.{name}: this family has no such parameter; it takes {', '.join(known) or 'none'}")
        if not known[name].allows(value):
            raise ConfigError(f"{key}.{name}={masked(value, name)!r}: it must be {known[name].allowed}")
    for each in known.values():
        if each.required and each.name not in given:
            raise ConfigError(f"{key}.{each.name} must be set: {each.meaning}")
    return cls(**given)
