"""Loads the simulated users of `actor.interactions`, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.extensions import EXTENSIONS
from asyncrl.config.imports import imported
from asyncrl.errors import ConfigError
from asyncrl.machine.process import is_ctrl_c
from asyncrl.masking import masked
from asyncrl.plain import copied
from asyncrl.text import reason_of
from asyncrl.tools.interactions.base import Interaction

FORM = "{class_name: module.Class, config: {...}}, or the dotted path of a class alone"


def load_interactions(entries: Mapping[str, Any]) -> dict[str, Interaction]:
    """Make an instance of each user, by name. Raises ConfigError: a user cannot be made."""
    return {name: _load(name, entry) for name, entry in entries.items()}


def _load(name: str, entry: Any) -> Interaction:
    setting = f"actor.interactions: {name}"
    given = {"class_name": entry} if isinstance(entry, str) else entry
    match given:
        case {"class_name": str(path), **rest} if rest.keys() <= {"config"}:
            config = rest.get("config") or {}
        case _:
            raise ConfigError(f"{setting} is {masked(entry)!r:.200}; it must be {FORM}")
    if not isinstance(config, Mapping):
        raise ConfigError(f"{setting}: config is {masked(config)!r:.100}; it must be a mapping")
    cls = imported(path, f"{setting}: class_name={path}", "the dotted path of a class, such as my_users.Customer")
    if not (isinstance(cls, type) and issubclass(cls, Interaction)):
        raise ConfigError(
            f"{setting}: {path} must be a subclass of asyncrl.tools.Interaction; a class written for "
            f"verl is named through {EXTENSIONS['actor.interactions']} (docs/environments.md)"
        )
    try:
        return cls({**copied(dict(config)), "name": name})
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(f"{setting}: {path} cannot be made with its config: {reason_of(error)}") from error
