"""verl's base class of interactions, for classes that were written for verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

from asyncrl.compat.yaml_files import read_yaml
from asyncrl.config.group_files import FAILURES
from asyncrl.config.imports import imported
from asyncrl.errors import ConfigError
from asyncrl.text import reason_of


class BaseInteraction:
    """A simulated user, whose name is `config["name"]`. An `instance_id` identifies an episode."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode, and return its id."""
        return str(uuid4()) if instance_id is None else instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return four values: True if the episode ends, the simulated user's message, the score of the policy's turn,
        and further data."""
        raise NotImplementedError(f"{type(self).__name__} must define generate_response")

    async def calculate_score(self, *arguments: Any, **kwargs: Any) -> float:
        """The score of a turn. Nothing calls this method, except maybe a class's own `generate_response`."""
        return 0.0

    async def finalize_interaction(self, *arguments: Any, **kwargs: Any) -> None:
        """End an episode."""


def interactions_of(path: str | None) -> dict[str, Any]:
    """The simulated users of a file with verl's list `interaction`, by name. Each entry has `name`, `class_name` and
    `config`.

    Raises ConfigError: the file cannot be read, or a class does not exist.
    """
    if not path:
        return {}
    setting = f"interaction_config_path={path}"
    try:
        content = read_yaml(Path(path).expanduser())
        entries = [(str(each["class_name"]), dict(each.get("config") or {}), each) for each in content["interaction"]]
    except (*FAILURES, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{setting} cannot be read: {reason_of(error)}") from error
    found: dict[str, Any] = {}
    for class_name, config, entry in entries:
        cls = imported(class_name, f"{setting}: class_name={class_name}")
        # As in verl, an entry without a name gets one from its class: WeatherInteraction becomes weather.
        name = str(entry.get("name") or class_name.rpartition(".")[2].removesuffix("Interaction").lower())
        found[name] = cls(config={**config, "name": name})
    return found
