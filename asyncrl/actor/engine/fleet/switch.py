"""How one server takes an update, and what happens to its requests in flight meanwhile.

| mode | requests in flight | prefix cache |
|---|---|---|
| in_place | pause, then continue with the keys and values that they have | kept; each version salts its requests |
| retract | pause, then continue once their keys and values are computed again | flushed |
| abort | end with the tokens that they have; the fleet continues them afterwards | flushed |
| drain | end by themselves, or are aborted after a while | flushed |

The first two need a server that reports which version sampled which token. Other servers are updated as by abort: then
no request is running during an update.
"""

from __future__ import annotations

from asyncrl.actor.engine.fleet.endpoint import Endpoint
from asyncrl.actor.engine.fleet.server import InferenceServer, ServerFaultError
from asyncrl.actor.engine.fleet.update import Update

ABORT_RETRY_S = 0.1
"""An abort that overtakes a request does not end it: aborts are repeated until none is in flight."""


def salted(mode: str) -> bool:
    """Whether the requests of each version have a prefix cache of their own; otherwise every update flushes it."""
    return mode == "in_place"


class Switcher:
    """Updates endpoints in `mode`. A drain that lasts `drain_s`, or an abort that lasts `abort_s`, is given up."""

    def __init__(self, mode: str, drain_s: float, abort_s: float = 60.0) -> None:
        self._mode = mode
        self._drain_s = drain_s
        self._abort_s = abort_s

    async def __call__(self, endpoint: Endpoint, update: Update) -> None:
        """Raises EngineError or WeightsError, after which the server's weights are unknown."""
        server = endpoint.server
        if self._mode in ("in_place", "retract") and server.spans:
            await server.pause(self._mode)
            await self._load(server, update)
            await server.resume()
        else:
            if not (self._mode == "drain" and await endpoint.idle(self._drain_s)):
                await self._abort(endpoint)
            await self._load(server, update)

    async def _load(self, server: InferenceServer, update: Update) -> None:
        await server.load(update)
        if not salted(self._mode):
            await server.flush()

    async def _abort(self, endpoint: Endpoint) -> None:
        for _ in range(int(self._abort_s / ABORT_RETRY_S)):
            if not endpoint.in_flight:
                return
            await endpoint.server.abort()
            if await endpoint.idle(ABORT_RETRY_S):
                return
        raise ServerFaultError(f"requests did not end within {self._abort_s:g} s of being aborted")
