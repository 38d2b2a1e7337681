"""The requests that one server has not answered yet, and the ways to end them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType

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

    def one(self, rid: str) -> RequestInFlight:
        """Count the request `rid` as in flight during an `async with` block. Cancelling the block aborts the request on
        the server.

        The block raises TimeoutError: it was interrupted.
        """
        return RequestInFlight(self, rid)

    def begin(self, scope: asyncio.Timeout) -> None:
        self._scopes.add(scope)

    def end(self, scope: asyncio.Timeout) -> None:
        self._scopes.discard(scope)
        if not self._scopes:
            self._idle.notify_all()

    def abort(self, rid: str) -> None:
        """Begin to abort a request on the server."""
        abort = asyncio.create_task(self._abort(rid))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)

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


class RequestInFlight:
    """The block of a request: see `RequestsInFlight.one`. A class takes less processor time than a generator."""

    __slots__ = ("_requests", "_rid", "_scope")

    def __init__(self, requests: RequestsInFlight, rid: str) -> None:
        self._requests = requests
        self._rid = rid

    async def __aenter__(self) -> None:
        self._scope = asyncio.timeout(None)
        await self._scope.__aenter__()
        self._requests.begin(self._scope)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)
            if isinstance(error, asyncio.CancelledError):
                self._requests.abort(self._rid)
        finally:
            self._requests.end(self._scope)


def interrupt(scope: asyncio.Timeout) -> None:
    """End the `async with` block of `scope` with TimeoutError now."""
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())
