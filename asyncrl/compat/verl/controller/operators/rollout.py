"""Runs episodes on the embedded engine of one worker, with the tools or agent of the configuration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from torch import Tensor

from asyncrl.engine.base import Engine
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.ids import ticket_id
from asyncrl.text import reason_of
from asyncrl.tools.call_threads import open_to_users
from asyncrl.types import Ticket, Trajectory

logger = logging.getLogger(__name__)

OpenPlayer = Callable[[AsyncExitStack], Awaitable[tuple[Engine, EpisodeRunner]]]
"""Opens the engine and the episode runner; closing the stack closes both."""


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of a rollout.

    - `concurrency`: episodes that run at once
    - `max_attempts`: attempts of each episode
    - `timeout_s`: seconds of each attempt
    """

    concurrency: int
    max_attempts: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class FailedEpisode:
    """A group member whose attempts all failed. `reason` says why the last attempt failed."""

    group_id: str
    member: int
    reason: str


class Rollout:
    """Runs episodes, up to `limits.concurrency` at once, with the weights of the last `update`.

    Call all methods from one thread. Raises ConfigError: the model, a tool or the agent cannot be used.
    """

    def __init__(self, open_player: OpenPlayer, limits: RolloutLimits) -> None:
        self._limits = limits
        self._loop = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._engine: Engine
        self._runner: EpisodeRunner
        try:
            self._loop.run(self._open(open_player))
        except BaseException:
            self.close()
            raise

    async def _open(self, open_player: OpenPlayer) -> None:
        # Blocking tools run in these threads. With one thread per call, no episode waits for another one's tool.
        open_to_users(asyncio.get_running_loop(), "a tool")
        self._engine, self._runner = await open_player(self._stack)

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def pad_token_id(self) -> int:
        """The token that pads rows: an end-of-turn token, which every tokenizer has."""
        return self._runner.chat.stop_ids[0]

    def update(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Serve these weights, given in the published format. The tensors must not change afterwards."""
        self._loop.run(self._engine.update_weights(version, tensors))

    def run(self, tickets: Sequence[Ticket]) -> list[Trajectory | FailedEpisode]:
        """Run an episode for each ticket, and return the outcomes. The episodes begin in the order of the tickets, and
        failed attempts are repeated."""
        return self._loop.run(self._run_all(tickets))

    def close(self) -> None:
        try:
            self._loop.run(self._stack.aclose())
        finally:
            self._loop.close()

    async def _run_all(self, tickets: Sequence[Ticket]) -> list[Trajectory | FailedEpisode]:
        room = asyncio.Semaphore(self._limits.concurrency)

        async def outcome(ticket: Ticket) -> Trajectory | FailedEpisode:
            async with room:
                return await self._outcome(ticket)

        return await asyncio.gather(*map(outcome, tickets))

    async def _outcome(self, ticket: Ticket) -> Trajectory | FailedEpisode:
        reason = ""
        for attempt in range(self._limits.max_attempts):
            this = replace(ticket, id=ticket_id(ticket.group_id, ticket.member, attempt))
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    return await self._runner.run(this, lambda: None)
            except Exception as error:
                reason = reason_of(error)
                logger.exception("episode %s failed: %s", this.id, reason)
        return FailedEpisode(ticket.group_id, ticket.member, reason)
