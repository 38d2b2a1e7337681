"""The base class of simulated users, which respond to the policy's answers and score them.

The methods have the names and arguments of verl's interactions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from asyncrl.tools.results import Content

Response = tuple[bool, Content, float | None, Mapping[str, Any]]
"""The response of a user: whether the conversation ends, the message, the score of the policy's turn, further data.

The message is a text, or a list of texts and images as in `results`. If the score is None, `calculate_score` gives the
score. The further data is ignored.
"""


class Interaction(ABC):
    """One kind of simulated user.

    An actor has one instance for all its episodes, many of which run at once. So keep the state of an episode under its
    `instance_id`.

    If a method raises or takes longer than `actor.interaction_timeout_s`, only its episode fails. The failure never
    counts as a score of zero. All methods run on the event loop: use `asyncio.to_thread` for code that blocks.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is the `config` in the user's entry of `actor.interactions`, with the user's `name` added."""
        self.config = config
        self.name = str(config.get("name", type(self).__name__))

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> Any:
        """Begin an episode. `kwargs` are the task's `interaction_kwargs`, `name` included. The result is ignored."""

    @abstractmethod
    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Response:
        """Respond to the last of `messages`, an answer of the policy without tool calls.

        `messages` are copies of all messages so far, tool results included. `kwargs` are as in `start_interaction`.
        """

    async def calculate_score(self, instance_id: str) -> float | None:
        """Score the policy's last turn, if `generate_response` returned None as its score. None: no score."""
        return None

    async def finalize_interaction(self, instance_id: str) -> None:
        """End an episode. Called exactly once for each `start_interaction`, also after a failure or a stop."""
