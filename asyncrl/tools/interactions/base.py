"""The protocol of a simulated user: a class that responds to the policy's answers, and scores them.

The methods have the names and arguments of verl's interactions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from asyncrl.tools.results import Content

Response = tuple[bool, Content, float | None, Mapping[str, Any]]
"""Whether the conversation ends, the user's message (a text, or a list of texts and images as in `results`), the score
of the policy's turn (None: `calculate_score` gives it), and further data, which is not used."""


class Interaction(ABC):
    """One kind of simulated user. An actor has one instance for all its episodes, many of which run at once: what
    belongs to an episode is kept under its `instance_id`.

    If a method raises or takes longer than `actor.interaction_timeout_s`, the episode fails, which is never a score of
    zero; other episodes go on. All methods run on the event loop: use `asyncio.to_thread` for code that blocks.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is the user's entry of `actor.interactions`, with its `name`."""
        self.config = config
        self.name = str(config.get("name", type(self).__name__))

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> Any:
        """An episode begins; `kwargs` are the task's `interaction_kwargs`, with the name. The result is not used."""

    @abstractmethod
    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Response:
        """Respond to the last of `messages`, an answer of the policy without tool calls. `messages` are copies of all
        messages so far, tool results included; `kwargs` are as in `start_interaction`."""

    async def calculate_score(self, instance_id: str) -> float | None:
        """The score of the policy's last turn, where `generate_response` gave None. None: it has no score."""
        return None

    async def finalize_interaction(self, instance_id: str) -> None:
        """The episode is over: called exactly once for each `start_interaction`, also after a failure or a stop."""
