"""A simulated user whose every call is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.tools import Interaction
from asyncrl.tools.interactions.users import InteractionLimits, Interactions
from asyncrl.types import Ticket
from tests.episode.fakes import make_ticket
from tests.helpers import GENEROUS_S

Respond = Callable[[str, list[dict[str, Any]]], Awaitable[Any]]


class Recorded(Interaction):
    """Responds as `respond` says, which gets the episode and the messages. `calls` are all calls in order: the method
    and the episode; `failing` names a method that raises, `hanging` one that never ends."""

    def __init__(self, respond: Respond, failing: str = "", hanging: str = "") -> None:
        super().__init__({"name": "recorded"})
        self.calls: list[tuple[str, str]] = []
        self.kwargs: list[dict[str, Any]] = []
        self._respond = respond
        self._failing = failing
        self._hanging = hanging

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.kwargs.append(kwargs)
        await self._called("start_interaction", instance_id)

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        self.kwargs.append(kwargs)
        await self._called("generate_response", instance_id)
        return await self._respond(instance_id, messages)

    async def finalize_interaction(self, instance_id: str) -> None:
        await self._called("finalize_interaction", instance_id)

    async def _called(self, method: str, instance_id: str) -> None:
        self.calls.append((method, instance_id))
        if method == self._failing:
            raise OSError("the user went away")
        if method == self._hanging:
            await asyncio.Event().wait()


def scripted(*responses: Any) -> Respond:
    """Gives the responses one after another."""
    left = list(responses)

    async def respond(instance_id: str, messages: list[dict[str, Any]]) -> Any:
        return left.pop(0)

    return respond


def on_offer(user: Interaction, **limits: Any) -> Interactions:
    return Interactions({"user": user}, InteractionLimits(**{"timeout_s": GENEROUS_S, **limits}))


def make_ticket_with_user(name: str = "t1", **kwargs: Any) -> Ticket:
    return make_ticket(name, extra_info={"interaction_kwargs": {"name": "user", **kwargs}})
