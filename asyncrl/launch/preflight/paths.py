"""Checks that the files, folders and modules that a configuration names exist.

`asyncrl train` runs this check first, because all other checks import torch and transformers, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.imports import imported
from asyncrl.config.refusals import missing_data
from asyncrl.config.schema import ActorConfig, AlgorithmConfig, DataConfig, ModelConfig, ScoringConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch.preflight.models import missing_folder
from asyncrl.machine.remote_folder import is_url


def check_paths(
    data: DataConfig, algorithm: AlgorithmConfig, model: ModelConfig, actor: ActorConfig, scoring: ScoringConfig
) -> None:
    """Raises DataError or ConfigError, with a line for each path that does not exist."""
    files = missing_data(data, algorithm.sft.path)
    lines = [*files.values()]
    if not is_url(model.path) and (reason := missing_folder(model.path)):
        lines.append(f"model.path={model.path}: {reason}")
    for setting, path in (*_of_actor(actor), *_of_scoring(scoring)):
        # Modules of asyncrl are skipped: they exist, and importing them may load torch.
        if "." in path and not path.startswith("asyncrl."):
            try:
                imported(path, setting)
            except ConfigError as error:
                lines.append(str(error))
    if lines:
        raise (DataError if len(lines) == len(files) else ConfigError)("\n".join(lines))


def _of_actor(actor: ActorConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting with the dotted path that it names."""
    yield from ((f"actor.tools: {name!r}", name) for name in actor.tools)
    yield from ((f"actor.environments: {name}={path}", path) for name, path in actor.environments.items())
    for key, path in (("environment", actor.environment), ("agent", actor.agent), ("step_split", actor.step_split)):
        if path:
            yield f"actor.{key}={path}", path
    for name, entry in actor.interactions.items():
        path = entry.get("class_name") if isinstance(entry, Mapping) else entry
        if isinstance(path, str):
            yield f"actor.interactions: {name}: class_name={path}", path


def _of_scoring(scoring: ScoringConfig) -> Iterator[tuple[str, str]]:
    """Yield each setting with the dotted path that it names."""
    for key, value in (("scoring.rule", scoring.rule), *((f"scoring.rules.{k}", v) for k, v in scoring.rules.items())):
        yield from ((f"{key}={name}", name) for name in _names(value))
    if scoring.steps is not None:
        yield f"scoring.steps={scoring.steps}", scoring.steps
    yield f"scoring.prm.family={scoring.prm.family}", scoring.prm.family
    yield f"scoring.outcome_model.family={scoring.outcome_model.family}", scoring.outcome_model.family


def _names(value: Any) -> Iterator[str]:
    """Yield the names of rules in a value of `scoring.rule`."""
    for each in value if isinstance(value, list) else [value]:
        name = each.get("name") if isinstance(each, Mapping) else each
        if isinstance(name, str):
            yield name
