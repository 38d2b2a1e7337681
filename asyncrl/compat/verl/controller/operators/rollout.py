"""Episodes on the embedded engine of one worker, with the player that the configuration names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from torch import Tensor

from asyncrl.actor.from_config import open_runner
from asyncrl.config.schema import TrainConfig
from asyncrl.engine.base import Engine
from asyncrl.engine.opening import open_engine
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.errors import ConfigError
from asyncrl.ids import ticket_id
from asyncrl.text import reason_of
from asyncrl.types import Ticket, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FailedEpisode:
    """A member of a group without a trajectory, and the reason of its last attempt."""

    group_id: str
    member: int
    reason: str


class Rollout:
    """Runs episodes, up to `actor.concurrency` at once, under the newest weights that `update` gave.

    All methods are called from one thread. Raises ConfigError: `engine.kind` is not embedded, or the model or the
    player cannot be used.
    """

    def __init__(self, config: TrainConfig) -> None:
        if config.engine.kind != "embedded":
            raise ConfigError(
                f"engine.kind={config.engine.kind}: workers generate with the embedded engine, set "
                "engine.kind=embedded; `asyncrl train` uses servers"
            )
        self._config = config
        self._loop = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._engine: Engine
        self._runner: EpisodeRunner
        self._loop.run(self._open())

    async def _open(self) -> None:
        # Tools that block run in these threads; as many as there are episodes, so that none waits for another's tool.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(self._config.actor.concurrency))
        self._engine = open_engine(self._config).engine
        self._stack.push_async_callback(self._engine.close)
        self._runner = await open_runner(self._config, self._engine, self._stack)

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def pad_token_id(self) -> int:
        """The id with which rows are padded: an end of a turn, which every tokenizer has."""
        return self._runner.chat.stop_ids[0]

    def update(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Serve these weights, in the published format, which must not change later."""
        self._loop.run(self._engine.update_weights(version, tensors))

    def run(self, tickets: Sequence[Ticket]) -> list[Trajectory | FailedEpisode]:
        """The outcome of each ticket. Episodes begin in their order; one that fails is tried `replay.max_attempts`
        times in all."""
        return self._loop.run(self._run_all(tickets))

    def close(self) -> None:
        self._loop.run(self._stack.aclose())
        self._loop.close()

    async def _run_all(self, tickets: Sequence[Ticket]) -> list[Trajectory | FailedEpisode]:
        room = asyncio.Semaphore(self._config.actor.concurrency)

        async def outcome(ticket: Ticket) -> Trajectory | FailedEpisode:
            async with room:
                return await self._outcome(ticket)

        return await asyncio.gather(*map(outcome, tickets))

    async def _outcome(self, ticket: Ticket) -> Trajectory | FailedEpisode:
        reason = ""
        for attempt in range(self._config.replay.max_attempts):
            this = replace(ticket, id=ticket_id(ticket.group_id, ticket.member, attempt))
            try:
                async with asyncio.timeout(self._config.actor.episode_timeout_s):
                    return await self._runner.run(this, lambda: None)
            except Exception as error:
                reason = reason_of(error)
                logger.exception("episode %s failed: %s", this.id, reason)
        return FailedEpisode(ticket.group_id, ticket.member, reason)
