"""Opens the player that plays episodes with agent loops of verl, in the actor's own process: `actor.agent=verl`."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from asyncrl.config.extensions import EXTENSIONS
from asyncrl.config.imports import imported
from asyncrl.config.schema import ActorConfig, DataConfig, ModelConfig
from asyncrl.episode.episode import Player
from asyncrl.errors import ConfigError
from asyncrl.plain import copied

SETTING = "actor.agent=verl"


def open_verl_loops(actor: ActorConfig, data: DataConfig, model: ModelConfig) -> Player:
    """Open the player. Raises ConfigError: `actor.agent_options` has unknown options, or a loop cannot be loaded."""
    made: Callable[..., Player] = imported(EXTENSIONS["actor.agent"], SETTING)
    options = copied({str(name): value for name, value in actor.agent_options.items()})
    try:
        inspect.signature(made).bind(actor, data, model, **options)
    except TypeError as error:
        raise ConfigError(f"{SETTING}: actor.agent_options: {error}; docs/verl.md lists the options") from error
    return made(actor, data, model, **options)
