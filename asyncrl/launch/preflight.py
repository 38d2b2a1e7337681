"""Checks before anything starts that every name in the configuration stands for something that can be used."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError, DataError, ToolError
from asyncrl.types import Purpose, Ticket

if TYPE_CHECKING:
    from asyncrl.actor.tools.base import Tool


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
        _check_creation(config, tools)


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


def _check_creation(config: TrainConfig, tools: Mapping[str, type[Tool]]) -> None:
    """Raises ConfigError: the tools of a row cannot be created, or are not all on offer. They are released again."""
    from asyncrl.actor.toolbox import Toolbox, ToolLimits
    from asyncrl.data.reading import TaskFile

    toolbox = Toolbox(tools, ToolLimits(config.actor.tool_timeout_s, config.actor.tool_retries))

    async def create(ticket: Ticket) -> None:
        async with toolbox.open(ticket):
            pass

    for path in (config.data.train, config.data.eval):
        for row, task in TaskFile(path).by_roles().items() if path is not None else ():
            try:
                asyncio.run(create(Ticket("preflight", task, "preflight", 0, Purpose.TRAIN, 1.0, 0)))
            except ToolError as error:
                raise ConfigError(
                    f"actor.tools: with row {row} of {path}, {error}; `create` gets the row's "
                    "extra_info.tools_kwargs[NAME] as keywords (docs/writing_a_tool.md)"
                ) from error
