"""Checks that the files, folders and modules that a configuration names exist.

`asyncrl train` runs this check first, because all other checks import torch and transformers, which takes seconds.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from asyncrl.config.extensions import EXTENSIONS
from asyncrl.config.group_files import FAILURES
from asyncrl.config.refusals import missing_data
from asyncrl.config.schema import ActorConfig, AlgorithmConfig, DataConfig, ModelConfig, PartConfig, ScoringConfig
from asyncrl.errors import ConfigError, DataError
from asyncrl.launch.preflight.importing import NamedCode, refused_imports
from asyncrl.launch.preflight.models import missing_folder
from asyncrl.machine.remote_folder import is_url
from asyncrl.version import PACKAGE

PART_NAME = re.compile(r'^    name = "(.+)"$', re.M)


def check_paths(
    data: DataConfig,
    algorithm: AlgorithmConfig,
    model: ModelConfig,
    actor: ActorConfig,
    scoring: ScoringConfig,
    stop: threading.Event | None = None,
) -> None:
    """Raises DataError or ConfigError, with a line for each path that does not exist, and for each tool, rule and part
    of the algorithm that is unknown; StoppedError: `stop` was set."""
    files = missing_data(data, algorithm.sft.path)
    lines = [*files.values()]
    if not is_url(model.path) and (reason := missing_folder(model.path)):
        lines.append(f"model.path={model.path}: {reason}")
    lines += _unknown_names(algorithm, actor, scoring)
    lines += refused_imports(named_code(data, algorithm, actor, scoring), stop)
    if lines:
        raise (DataError if len(lines) == len(files) else ConfigError)("\n".join(lines))


def check_imports(named: Sequence[NamedCode], stop: threading.Event | None = None) -> None:
    """Raises ConfigError, with a line for each object that cannot be imported; StoppedError: `stop` was set."""
    if lines := refused_imports(named, stop):
        raise ConfigError("\n".join(lines))


def named_code(
    data: DataConfig, algorithm: AlgorithmConfig, actor: ActorConfig, scoring: ScoringConfig
) -> list[NamedCode]:
    """The code outside of asyncrl that a configuration names."""
    found = [*_of_actor(actor), *_of_scoring(scoring), *_of_algorithm(algorithm), *_of_managers(scoring)]
    if data.dataset:
        found.append(NamedCode(f"data.dataset={data.dataset}", data.dataset))
    # Modules of asyncrl are skipped: they exist, and importing them may load torch.
    return [each for each in found if "." in each.path and not each.path.startswith("asyncrl.")]


def _of_actor(actor: ActorConfig) -> Iterator[NamedCode]:
    for name in actor.tools:
        yield NamedCode(f"actor.tools: {name!r}", name)
    for name, path in actor.environments.items():
        yield NamedCode(f"actor.environments: {name}={path}", path)
    for key, given in (("environment", actor.environment), ("agent", actor.agent), ("step_split", actor.step_split)):
        if given:
            yield NamedCode(f"actor.{key}={given}", given)
    for entry in actor.verl_tools:
        yield from _of_tool(entry)
    if actor.has_verl_loops:
        yield from _of_loops(actor.agent_options)
    for name, entry in actor.interactions.items():
        yield from _of_user(f"actor.interactions: {name}", name, entry)


def _of_user(setting: str, name: str, entry: Any) -> Iterator[NamedCode]:
    """Yield the class of a simulated user. A class written for verl is in the `config` of asyncrl's own class."""
    given = entry if isinstance(entry, Mapping) else {"class_name": entry}
    path, config = given.get("class_name"), given.get("config")
    if not isinstance(path, str):
        return
    yield NamedCode(f"{setting}: class_name={path}", path)
    inner = config.get("class_name") if isinstance(config, Mapping) else None
    if path == EXTENSIONS["actor.interactions"] and isinstance(inner, str):
        loads = "asyncrl.tools.interactions.registry.load_interactions"
        yield NamedCode(f"{setting}: class_name={inner}", inner, loads, ({name: entry},))


def _of_tool(entry: Any) -> Iterator[NamedCode]:
    """Yield the class or the file of a tool written for verl."""
    given, loads = entry if isinstance(entry, Mapping) else {}, EXTENSIONS["actor.verl_tools"]
    if isinstance(path := given.get("class_name"), str):
        yield NamedCode(f"actor.verl_tools: class_name={path}", path, loads, ([entry],))
    if isinstance(file := given.get("function_tool_path"), str):
        yield NamedCode(f"actor.verl_tools: function_tool_path={file}", f"{file}:tools", loads, ([entry],))


def _of_loops(options: Mapping[str, Any]) -> Iterator[NamedCode]:
    """Yield the classes of agent loops written for verl."""
    loads = EXTENSIONS["actor.agent_options"]
    paths = [("default_agent_loop", options.get("default_agent_loop"))]
    if file := options.get("agent_loop_config_path"):
        try:
            entries: Any = OmegaConf.to_container(OmegaConf.load(Path(str(file)).expanduser()))
        except FAILURES:  # Another check says what is wrong with the file.
            entries = []
        listed = entries if isinstance(entries, list) else []
        named = [each.get("_target_") for each in listed if isinstance(each, Mapping)]
        paths += [(f"agent_loop_config_path={file}: _target_", path) for path in named]
    for key, path in paths:
        if isinstance(path, str):
            yield NamedCode(f"actor.agent_options.{key}={path}", path, loads, (path,))


def _of_rules(scoring: ScoringConfig) -> Iterator[NamedCode]:
    for key, value in (("scoring.rule", scoring.rule), *((f"scoring.rules.{k}", v) for k, v in scoring.rules.items())):
        for name in _names(value):
            yield NamedCode(f"{key}={name}", name)


def _of_scoring(scoring: ScoringConfig) -> Iterator[NamedCode]:
    yield from _of_rules(scoring)
    if scoring.steps is not None:
        yield NamedCode(f"scoring.steps={scoring.steps}", scoring.steps)
    yield NamedCode(f"scoring.prm.family={scoring.prm.family}", scoring.prm.family)
    yield NamedCode(f"scoring.outcome_model.family={scoring.outcome_model.family}", scoring.outcome_model.family)


def _unknown_names(algorithm: AlgorithmConfig, actor: ActorConfig, scoring: ScoringConfig) -> Iterator[str]:
    """Yield a line for each name that is neither a built-in tool, rule or part of the algorithm nor a path."""
    from asyncrl.scoring.rules.registry import refuse_unknown as refuse_unknown_rule
    from asyncrl.tools.registry import refuse_unknown as refuse_unknown_tool

    checks = [partial(refuse_unknown_tool, name) for name in actor.tools]
    checks += [partial(refuse_unknown_rule, code.path, code.setting) for code in _of_rules(scoring)]
    checks += [partial(_refuse_unknown_part, key, name) for key, name in _parts(algorithm)]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)


def _parts(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and the name of each part of the algorithm."""
    for key, chosen in vars(algorithm).items():
        for part in chosen if isinstance(chosen, list) else [chosen]:
            if isinstance(part, PartConfig):
                yield key, part.name


def _refuse_unknown_part(key: str, name: str) -> None:
    """Raises ConfigError: `name` is neither a built-in part of the algorithm nor a path."""
    if "." not in name and name not in part_names():
        from asyncrl.algorithms.registry import find

        find(key.removeprefix("value_"), name, key)


@cache
def part_names() -> frozenset[str]:
    """The names of all built-in parts of algorithms, from their sources: importing the parts would load torch."""
    sources = (PACKAGE / "algorithms").rglob("*.py")
    return frozenset(name for source in sources for name in PART_NAME.findall(source.read_text()))


def _of_algorithm(algorithm: AlgorithmConfig) -> Iterator[NamedCode]:
    for key, name in _parts(algorithm):
        yield NamedCode(f"algorithm.{key}={name}", name)


def _of_managers(scoring: ScoringConfig) -> Iterator[NamedCode]:
    """Yield the classes and functions of reward managers, which may import verl."""
    for source in ("", *scoring.manager.sources):
        key = f"scoring.manager.sources.{source}" if source else "scoring.manager"
        settings = scoring.manager.of(source) or {}
        for name in ("name", "compute_score"):
            if path := settings.get(name):
                yield NamedCode(f"{key}.{name}={path}", path, f"{EXTENSIONS['scoring.manager']}.check", (settings, key))


def _names(value: Any) -> Iterator[str]:
    """Yield the names of rules in a value of `scoring.rule`."""
    for each in value if isinstance(value, list) else [value]:
        name = each.get("name") if isinstance(each, Mapping) else each
        if isinstance(name, str):
            yield name
