"""Creates the tools or the environments of tasks before a run starts, and starts simulated users, as episodes would.

The user's own code runs in the child process of a `TrialProcess`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from asyncrl.config.schema import ActorConfig
from asyncrl.errors import ConfigError, InteractionError, ToolError
from asyncrl.ids import TRIAL_GROUP, ticket_id
from asyncrl.launch.preflight.episodes.own_code import OwnCode
from asyncrl.text import reason_of
from asyncrl.types import Purpose, Task, Ticket

if TYPE_CHECKING:
    from asyncrl.data.reading import TaskFile
    from asyncrl.launch.preflight.trial import TrialProcess

log = logging.getLogger("asyncrl.train")

NOTICE_S = 10.0


def check_creation(actor: ActorConfig, files: Sequence[TaskFile], trial: TrialProcess) -> None:
    """Create the tools or the environment of some rows: for each tool and each environment, the first row that names
    it. Raises: see `create`."""
    own = OwnCode.of(actor)
    for file in files:
        for row, task in (file.by_roles() | file.by_environment()).items():
            place = file.place(row)
            if own.tools or own.environments:
                trial.create(own.opened(), task, place)
                continue
            # Asyncrl's own tools may take minutes at first, such as for a download.
            with _notice(f"`create` of actor.tools has not finished yet, for {place}"):
                asyncio.run(create(actor, task, place))


def check_users(actor: ActorConfig, files: Sequence[TaskFile], trains: bool, trial: TrialProcess) -> None:
    """Start each simulated user with the first row that names it. Raises ConfigError: a user cannot start, no row names
    a user, or a row names an unknown user."""
    if not actor.interactions or not files:
        return
    named = [(file.place(row), task) for file in files for row, task in file.by_user().items()]
    if not named and trains:  # An evaluation may be on tasks without a user.
        raise ConfigError(
            "actor.interactions: no task names one of the users in extra_info.interaction_kwargs.name "
            "(docs/environments.md); add it to the data, or leave actor.interactions empty"
        )
    for place, task in named:
        trial.start_user(f"the simulated user of {', '.join(actor.interactions)}", task, place)


@contextmanager
def _notice(text: str) -> Iterator[None]:
    """Log `text` if the block takes longer than NOTICE_S. Code that blocks cannot be interrupted."""
    timer = threading.Timer(NOTICE_S, log.warning, (f"{text}; press Ctrl-C twice to end the start",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def try_ticket(task: Task) -> Ticket:
    """The ticket (the task and its settings) of an episode that only a check plays. Its id has the form of a run's ids,
    which a rule may read."""
    return Ticket(ticket_id(TRIAL_GROUP, 1, 0), task, TRIAL_GROUP, 1, Purpose.TRAIN, 1.0, 0)


async def create(actor: ActorConfig, task: Task, place: str) -> None:
    """Create the tools or the environment of the task in the row `place`, and release them again.

    Raises ConfigError: a tool or the environment cannot be created, or the row names a tool that the run does not
    offer.
    """
    from asyncrl.actor.from_config import open_toolbox
    from asyncrl.tools.toolbox import Toolbox

    toolbox = open_toolbox(actor)
    try:
        async with toolbox.open(try_ticket(task)):
            pass
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
    finally:
        await toolbox.close()


async def start_user(actor: ActorConfig, task: Task, place: str) -> None:
    """Start the simulated user that the task in the row `place` names, and finalize it again.

    Raises ConfigError: the user cannot start, or the row names an unknown user.
    """
    from asyncrl.tools.interactions.registry import load_interactions
    from asyncrl.tools.interactions.users import InteractionLimits, Interactions

    users = Interactions(load_interactions(actor.interactions), InteractionLimits(actor.interaction_timeout_s))
    try:
        async with users.open(try_ticket(task)):
            pass
    except InteractionError as error:
        raise ConfigError(
            f"actor.interactions: with {place}, {error}; `start_interaction` gets the row's "
            "extra_info.interaction_kwargs as keywords (docs/environments.md)"
        ) from error
