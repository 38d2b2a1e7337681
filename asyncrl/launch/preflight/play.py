"""Checks that the tools, environments, users and the agent of the episodes can be used with the rows of the data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.config.schema import ActorConfig, DataConfig, ModelConfig
from asyncrl.errors import ConfigError, InteractionError, ToolError
from asyncrl.launch.preflight.episode import notice, try_ticket
from asyncrl.text import reason_of
from asyncrl.types import Ticket

if TYPE_CHECKING:
    from asyncrl.data.reading import TaskFile

log = logging.getLogger("asyncrl.train")


def check_play(actor: ActorConfig, files: Sequence[TaskFile], trains: bool) -> None:
    """Raises ConfigError: the tools, environments or simulated users of the episodes cannot be used."""
    from asyncrl.episode.steps import find_split
    from asyncrl.tools.interactions.registry import load_interactions
    from asyncrl.tools.offered import Offer

    find_split(actor.step_split)
    load_interactions(actor.interactions)
    Offer(actor)
    if not actor.played_by:
        _check_creation(actor, files)
        _warn_of_missing_tools(actor, files)
        _check_users(actor, files, trains)


def check_agent(actor: ActorConfig, data: DataConfig, model: ModelConfig) -> None:
    """Raises ConfigError: the agent of the episodes cannot be used."""
    from asyncrl.agents.chat_api.agent import load_agent
    from asyncrl.agents.chat_api.program import check_command
    from asyncrl.agents.verl_loops import open_verl_loops

    if actor.has_verl_loops:
        open_verl_loops(actor, data, model)
    elif actor.agent is not None:
        load_agent(actor.agent, actor.agent_options)
    if actor.agent_command:
        check_command(actor.agent_command)


def _check_creation(actor: ActorConfig, files: Sequence[TaskFile]) -> None:
    """Create the tools of one row of each kind, or reset its environment, and release them again. Raises ConfigError: a
    tool cannot be created, an environment cannot be reset, or a row names a tool that the run does not offer."""
    from asyncrl.actor.from_config import open_toolbox
    from asyncrl.tools.toolbox import Toolbox

    toolbox = open_toolbox(actor)
    is_tools = isinstance(toolbox, Toolbox)

    async def create(ticket: Ticket) -> None:
        try:
            async with toolbox.open(ticket):
                pass
        finally:
            await toolbox.close()

    for file in files:
        for row, task in (file.by_roles() | file.by_environment()).items():
            place = file.place(row)
            # A call of `create` that blocks cannot be interrupted. The first call may take minutes, such as for a
            # download.
            what = "`create` of actor.tools" if is_tools else "`reset` of an environment"
            try:
                with notice(f"{what} has not finished yet, for {place}"):
                    asyncio.run(create(try_ticket(task)))
            except Exception as error:
                reason = error if isinstance(error, ToolError) else reason_of(error)
                if not isinstance(toolbox, Toolbox):
                    raise ConfigError(
                        f"with {place}, {reason}; `reset` gets the task's row as keywords (docs/environments.md)"
                    ) from error
                given = ", ".join(name for name, kwargs in task.tools_kwargs.items() if kwargs) or "none"
                raise ConfigError(
                    f"actor.tools: with {place}, {reason}; `create` gets the row's "
                    "extra_info.tools_kwargs[NAME] as keywords, where NAME is the name in the tool's `schema` "
                    f"(on offer: {', '.join(toolbox.functions)}; the row has: {given}; docs/tools.md)"
                ) from error


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


def _check_users(actor: ActorConfig, files: Sequence[TaskFile], trains: bool) -> None:
    """Start each simulated user with the first row that names it, and finalize it again. Raises ConfigError: a user
    cannot start, no row names a user, or a row names an unknown user."""
    from asyncrl.tools.interactions.registry import load_interactions
    from asyncrl.tools.interactions.users import InteractionLimits, Interactions

    if not actor.interactions or not files:
        return
    limits = InteractionLimits(actor.interaction_timeout_s)
    users = Interactions(load_interactions(actor.interactions), limits)

    async def start(ticket: Ticket) -> None:
        async with users.open(ticket):
            pass

    named = [(file.place(row), task) for file in files for row, task in file.by_user().items()]
    if not named and trains:  # An evaluation may be on tasks without a user.
        raise ConfigError(
            "actor.interactions: no task names one of the users in extra_info.interaction_kwargs.name "
            "(docs/environments.md); add it to the data, or leave actor.interactions empty"
        )
    for place, task in named:
        try:
            asyncio.run(start(try_ticket(task)))
        except InteractionError as error:
            raise ConfigError(
                f"actor.interactions: with {place}, {error}; `start_interaction` gets the row's "
                "extra_info.interaction_kwargs as keywords (docs/environments.md)"
            ) from error
