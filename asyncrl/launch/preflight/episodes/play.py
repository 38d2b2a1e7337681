"""Checks that the tools, environments, users and the agent of the episodes can be used with the rows of the data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.config.schema import ActorConfig, DataConfig, ModelConfig
from asyncrl.launch.preflight.episodes.creation import check_creation, check_users
from asyncrl.launch.preflight.trial import TrialProcess

if TYPE_CHECKING:
    from asyncrl.data.reading import TaskFile

log = logging.getLogger("asyncrl.train")


def check_play(actor: ActorConfig, files: Sequence[TaskFile], trains: bool, trial: TrialProcess) -> None:
    """Raises ConfigError: the tools, environments or simulated users of the episodes cannot be used."""
    from asyncrl.episode.steps import find_split
    from asyncrl.tools.interactions.registry import load_interactions
    from asyncrl.tools.offered import Offer

    find_split(actor.step_split)
    load_interactions(actor.interactions)
    Offer(actor)
    if not actor.played_by:
        check_creation(actor, files, trial)
        _warn_of_missing_tools(actor, files)
        check_users(actor, files, trains, trial)


def check_agent(actor: ActorConfig, data: DataConfig, model: ModelConfig, files: Sequence[TaskFile]) -> None:
    """Raises ConfigError: the agent of the episodes cannot be used, or a row names an unknown agent loop."""
    from asyncrl.agents.chat_api.agent import load_agent
    from asyncrl.agents.chat_api.program import check_command
    from asyncrl.agents.verl_loops import check_loops

    if actor.has_verl_loops:
        check_loops(actor, data, model, files)
    elif actor.agent is not None:
        load_agent(actor.agent, actor.agent_options)
    if actor.agent_command:
        check_command(actor.agent_command)


def _warn_of_missing_tools(actor: ActorConfig, files: Sequence[TaskFile]) -> None:
    """Warn if a row has arguments for tools that the run does not offer."""
    from asyncrl.tools.offered import Offer

    if actor.has_environments:
        return
    offered = Offer(actor).always
    for file in files:
        for row, task in file.by_roles().items():
            named = [name for name, kwargs in task.tools_kwargs.items() if kwargs is not None and name not in offered]
            if named:
                log.warning(
                    "actor.tools offers %s, but %s has tools_kwargs for %s: calls of a tool that is not on offer fail. "
                    "Add it to actor.tools (docs/tools.md), unless episodes should do without it",
                    *(", ".join(offered) or "no tools", file.place(row), ", ".join(named)),
                )
                return
