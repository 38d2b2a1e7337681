"""verl's base class of interactions, for classes that were written for verl."""

from __future__ import annotations

from typing import Any
from uuid import uuid4


class BaseInteraction:
    """A simulated user, made with `config`, which has its `name`. Episodes are identified by `instance_id`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode, and return its id."""
        return str(uuid4()) if instance_id is None else instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """True at the end of the episode, the user's message, the score of the policy's turn, and further data."""
        raise NotImplementedError(f"{type(self).__name__} has no generate_response of its own")

    async def calculate_score(self, *arguments: Any, **kwargs: Any) -> float:
        """The score of a turn, for classes whose `generate_response` calls this method; nothing else calls it."""
        return 0.0

    async def finalize_interaction(self, *arguments: Any, **kwargs: Any) -> None:
        """End an episode."""
