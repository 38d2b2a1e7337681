"""verl's base class of interactions, for classes that were written for verl."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


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
        """Return whether the episode ends, the user's message, the score of the policy's turn, and further data."""
        raise NotImplementedError(f"{type(self).__name__} must define generate_response")

    async def calculate_score(self, *arguments: Any, **kwargs: Any) -> float:
        """The score of a turn. Only a class's own `generate_response` calls this method."""
        return 0.0

    async def finalize_interaction(self, *arguments: Any, **kwargs: Any) -> None:
        """End an episode."""
