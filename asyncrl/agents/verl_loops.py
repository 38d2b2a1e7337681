"""Opens the player that plays episodes with agent loops of verl, in the actor's own process: `actor.agent=verl`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from asyncrl.config.extensions import EXTENSIONS
from asyncrl.config.imports import imported
from asyncrl.config.schema import ActorConfig, DataConfig, ModelConfig
from asyncrl.episode.episode import Player
from asyncrl.errors import ConfigError
from asyncrl.plain import copied

if TYPE_CHECKING:
    from asyncrl.data.reading import TaskFile

SETTING = "actor.agent=verl"
NAMES = "agent_name"
"""The column of a row, or the field of the row's `extra_info`, that names the row's loop."""


class LoopPlayer(Player, Protocol):
    """Plays each episode with the loop that its row names."""

    def refusal_of(self, name: str) -> str:
        """The reason for which a row cannot be played by the loop `name`. Empty if it can."""


def open_verl_loops(actor: ActorConfig, data: DataConfig, model: ModelConfig) -> LoopPlayer:
    """Open the player. Raises ConfigError: `actor.agent_options` has unknown options, or a loop cannot be loaded."""
    made: Callable[..., LoopPlayer] = imported(EXTENSIONS["actor.agent"], SETTING)
    options = copied({str(name): value for name, value in actor.agent_options.items()})
    try:
        inspect.signature(made).bind(actor, data, model, **options)
    except TypeError as error:
        raise ConfigError(f"{SETTING}: actor.agent_options: {error}; docs/verl.md lists the options") from error
    return made(actor, data, model, **options)


def check_loops(actor: ActorConfig, data: DataConfig, model: ModelConfig, files: Sequence[TaskFile]) -> None:
    """Raises ConfigError: the player cannot be opened, or a row names a loop that does not exist."""
    player = open_verl_loops(actor, data, model)
    for file in files:
        for name, row in file.texts_of(NAMES).items():
            if refusal := player.refusal_of(name):
                raise ConfigError(f"{SETTING}: {file.place(row)}: {refusal}")
