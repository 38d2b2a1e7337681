"""The requests that one server has not answered yet, and the ways to end them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from asyncrl.engine.fleet.condition import Condition
from asyncrl.engine.fleet.server import InferenceServer, ServerFaultError
from asyncrl.errors import EngineError

ABORT_S = 60.0
ABORT_RETRY_S = 0.1
"""Seconds between two aborts of one request. Aborts are repeated, since an abort that arrives before its request does
not end the request."""


class RequestsInFlight:
    """The requests in flight to `server`."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._scopes: set[asyncio.Timeout] = set()
        self._aborts: set[asyncio.Task[None]] = set()
        self._idle = Condition()

    def __len__(self) -> int:
        return len(self._scopes)

    @asynccontextmanager
    async def one(self, rid: str) -> AsyncIterator[None]:
        """Count the request `rid` as in flight during the `async with` block. Cancelling the block aborts the request
        on the server.

        Raises TimeoutError: the block was interrupted.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                yield
        except asyncio.CancelledError:
            abort = asyncio.create_task(self._abort(rid))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
            raise
        finally:
            self._scopes.discard(scope)
            if not self._scopes:
                self._idle.notify_all()

    async def idle(self, seconds: float) -> bool:
        """Wait until no request is in flight, for at most `seconds`. False if requests are still in flight."""
        return await self._idle.wait_for(lambda: not self._scopes, seconds)

    async def abort_all(self) -> None:
        """Let the server end all requests and answer each with its tokens so far. Raises ServerFaultError: some
        requests do not end."""
        for _ in range(int(ABORT_S / ABORT_RETRY_S)):
            if not self._scopes:
                return
            await self._server.abort()
            if await self.idle(ABORT_RETRY_S):
                return
        raise ServerFaultError(f"requests did not end within {ABORT_S:g} s after they were aborted")

    def interrupt(self) -> None:
        """End all requests in this process, without a message to the server."""
        for scope in self._scopes:
            interrupt(scope)

    async def aborted(self) -> None:
        """Wait until the aborts of all cancelled requests have been sent."""
        await asyncio.gather(*self._aborts)

    async def _abort(self, rid: str) -> None:
        with suppress(EngineError):
            await self._server.abort(rid)


def interrupt(scope: asyncio.Timeout) -> None:
    """End the `async with` block of `scope` with TimeoutError now."""
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())
