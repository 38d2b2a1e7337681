"""Checks before anything starts that every name in the configuration stands for something that can be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError, DataError


def preflight(config: TrainConfig) -> None:
    """Load keys, tools, chat template, rules, model families and the algorithm's parts once, as their roles will.

    Raises ConfigError or DataError with the message of each check that fails.
    """
    failures: list[ConfigError | DataError] = []
    for check in (_check_keys, _check_episodes, _check_scoring, _check_algorithm):
        try:
            check(config)
        except (ConfigError, DataError) as error:
            failures.append(error)
    if failures:
        raise type(failures[0])("\n".join(map(str, failures))) from failures[0]


def _check_keys(config: TrainConfig) -> None:
    from asyncrl.network.keys import client_keys, server_keys

    server_keys(config.network)
    client_keys(config.network)


def _check_episodes(config: TrainConfig) -> None:
    from asyncrl.actor.chat_api.agent import load_agent
    from asyncrl.actor.steps import find_split
    from asyncrl.actor.tools.registry import tool_classes

    find_split(config.actor.step_split)
    tools = tool_classes(config.actor.tools)
    if config.actor.agent is not None:
        load_agent(config.actor.agent)
    else:
        _check_template(config, {name: tool.schema for name, tool in tools.items()})


def _check_scoring(config: TrainConfig) -> None:
    from asyncrl.scoring.models.registry import check_models
    from asyncrl.scoring.rules.registry import load_rules

    load_rules(config.scoring)
    check_models(config.scoring.prm, config.scoring.outcome_model)


def _check_algorithm(config: TrainConfig) -> None:
    from asyncrl.algorithms.composition import check

    check(
        config.algorithm,
        step_scores=(config.scoring.prm.is_configured and not config.scoring.shadow) or config.implicit.train,
        group_size=config.learner.group_size,
    )


def _check_template(config: TrainConfig, functions: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError: the model's chat template does not take the tools or the data."""
    from asyncrl.actor.chat_checks import check_tasks, check_tools, open_chat
    from asyncrl.data.reading import TaskFile

    chat = open_chat(config)
    check_tools(chat, functions)
    for path in (config.data.train, config.data.eval):
        if path is not None:
            check_tasks(chat, path, TaskFile(path).by_roles(), functions)
