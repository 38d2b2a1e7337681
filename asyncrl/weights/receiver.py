"""The engine's end: follows the newest version for ever, and switches the engine to it whole or not at all.

What holds, for any channel: the manifest covers exactly the engine's tensors before the first byte is taken; the engine
sees only what arrived whole with every checksum right; a version never moves backwards. Whatever fails leaves the
engine on the version it has, is logged and counted, and is tried again with whatever is newest by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

import torch

from asyncrl.actor.engine.base import Engine
from asyncrl.errors import UnavailableError, WeightsError, WireError
from asyncrl.weights.manifest import Manifest

logger = logging.getLogger(__name__)


class Channel(Protocol):
    """A way for weights to travel. Its methods raise UnavailableError, WireError or WeightsError."""

    endpoint: str

    async def newer_than(self, version: int) -> Manifest | None:
        """The newest manifest as soon as it is newer than `version`, or None after a second or so without one."""
        ...

    async def fetch(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """All tensors of the manifest, their checksums verified."""
        ...

    def reset(self) -> None:
        """Drop what is under way; the next call starts afresh."""
        ...


class Receiver:
    """Follows `channel` for an engine whose tensors have the names and shapes in `expected`."""

    def __init__(self, channel: Channel, expected: Mapping[str, tuple[int, ...]], *, retry_s: float = 5.0) -> None:
        self._channel = channel
        self._expected = expected
        self._retry_s = retry_s
        self.updates = 0
        self.refused = 0

    async def run(self, engine: Engine) -> None:
        """Update `engine` whenever there is a newer version; returns only by cancellation."""
        logger.info("waiting for weights newer than version %d from %s", engine.version, self._channel.endpoint)
        try:
            while True:
                await self._attempt(engine)
        finally:
            self._channel.reset()

    async def _attempt(self, engine: Engine) -> None:
        try:
            await self._update(engine)
        except UnavailableError as error:
            self._channel.reset()
            logger.warning("waiting for the learner: %s", error)
        except (WeightsError, WireError) as error:
            self._channel.reset()
            self.refused += 1
            logger.error("no new weights, the engine stays at version %d: %s", engine.version, error)
            await asyncio.sleep(self._retry_s)

    async def _update(self, engine: Engine) -> None:
        manifest = await self._channel.newer_than(engine.version)
        if manifest is None:
            return
        manifest.check_covers(self._expected)
        await engine.update_weights(manifest.version, await self._channel.fetch(manifest))
        self.updates += 1
        logger.info("the engine serves version %d (%.1f MB)", manifest.version, manifest.nbytes / 1e6)
