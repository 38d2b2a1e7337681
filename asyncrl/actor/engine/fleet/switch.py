"""How one server takes an update, and what happens to its requests in flight meanwhile.

| mode | requests in flight | prefix cache |
|---|---|---|
| in_place | go on with the keys and values they have | kept; salted by version |
| retract | go on once their keys and values are computed anew | flushed |
| abort | answer with what they have; the fleet continues them afterwards | flushed, or salted |
| drain | end by themselves, or are aborted after a while | flushed, or salted |

The first two need a server that tells which version sampled which token. Another one is updated as by abort, so that no
request ever meets an update there.
"""

from __future__ import annotations

from asyncrl.actor.engine.fleet.endpoint import Endpoint
from asyncrl.actor.engine.fleet.server import InferenceServer, ServerFaultError
from asyncrl.actor.engine.fleet.update import Update

ABORT_RETRY_S = 0.1
"""An abort that overtakes a request does not end it: aborts are repeated until none is in flight."""


class Switcher:
    """Updates endpoints in `mode`. A drain that lasts `drain_s`, or an abort that lasts `abort_s`, is given up.

    `flush` is whether prefixes of older versions are flushed (otherwise requests are salted).
    """

    def __init__(self, mode: str, flush: bool, drain_s: float, abort_s: float = 60.0) -> None:
        self._mode = mode
        self._flush = flush
        self._drain_s = drain_s
        self._abort_s = abort_s

    async def __call__(self, endpoint: Endpoint, update: Update) -> None:
        """Raises EngineError or WeightsError, after which the server's weights are unknown."""
        if self._mode in ("in_place", "retract") and endpoint.server.spans:
            await self._paused(endpoint.server, update)
        else:
            await self._idle(endpoint, update)

    async def _paused(self, server: InferenceServer, update: Update) -> None:
        await server.pause(self._mode)
        await server.load(update)
        if self._flush:
            await server.flush()
        await server.resume()

    async def _idle(self, endpoint: Endpoint, update: Update) -> None:
        if not (self._mode == "drain" and await endpoint.idle(self._drain_s)):
            await self._abort(endpoint)
        await endpoint.server.load(update)
        if self._flush:
            await endpoint.server.flush()

    async def _abort(self, endpoint: Endpoint) -> None:
        for _ in range(int(self._abort_s / ABORT_RETRY_S)):
            if not endpoint.in_flight:
                return
            await endpoint.server.abort()
            if await endpoint.idle(ABORT_RETRY_S):
                return
        raise ServerFaultError(f"requests did not end within {self._abort_s:g} s of being aborted")
