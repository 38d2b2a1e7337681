"""Checks before anything starts that every name in the configuration stands for something that can be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import TrainConfig


def preflight(config: TrainConfig) -> None:
    """Load keys, tools, chat template, rules, model families and the algorithm's parts once, as their roles will.

    Raises ConfigError, which says how to mend it.
    """
    from asyncrl.actor.chat_api.agent import load_agent
    from asyncrl.actor.steps import find_split
    from asyncrl.actor.tools.registry import tool_classes
    from asyncrl.algorithms.compose import check
    from asyncrl.network.keys import client_keys, server_keys
    from asyncrl.scoring.models.registry import check_models
    from asyncrl.scoring.rules.registry import load_rules

    server_keys(config.network)
    client_keys(config.network)
    tools = tool_classes(config.actor.tools)
    if config.actor.agent is not None:
        load_agent(config.actor.agent)
    else:
        _check_template(config, {name: tool.schema for name, tool in tools.items()})
    find_split(config.actor.step_split)
    load_rules(config.scoring)
    check_models(config.scoring.prm, config.scoring.outcome_model)
    check(
        config.algorithm,
        critic=True,
        step_scores=(config.scoring.prm.path is not None and not config.scoring.shadow) or config.implicit.train,
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
