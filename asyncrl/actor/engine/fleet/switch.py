"""How one server takes an update: what becomes of the requests that it is working on.

| mode | requests under way | prefix cache |
|---|---|---|
| in_place | go on with the keys and values they have | kept; salted by version |
| retract | go on once theirs are computed anew | flushed |
| abort | answer with what they have; the fleet goes on with them afterwards | flushed, or salted |
| drain | end by themselves, or are aborted after a while | flushed, or salted |

The first two need a server that tells which version sampled which token; another one is updated as by abort, so that
no request ever meets an update there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from asyncrl.actor.engine.fleet.member import Member
from asyncrl.actor.engine.fleet.server import Server, ServerFaultError
from asyncrl.actor.engine.fleet.signal import Signal
from asyncrl.actor.engine.fleet.update import Update

ABORT_RETRY_S = 0.1
"""An abort that overtakes a request does not end it: they are repeated until none is under way."""


class Switcher:
    """Updates members in `mode`. A drain that lasts `drain_s`, or an abort that lasts `abort_s`, is given up.

    `flush` is whether prefixes of older versions are flushed (otherwise requests are salted).
    """

    def __init__(self, mode: str, flush: bool, drain_s: float, changed: Signal, abort_s: float = 60.0) -> None:
        self._mode = mode
        self._flush = flush
        self._drain_s = drain_s
        self._abort_s = abort_s
        self._changed = changed

    async def __call__(self, member: Member, update: Update) -> None:
        """Raises EngineError or WeightsError, after which the server's weights are unknown."""
        if self._mode in ("in_place", "retract") and member.server.spans:
            await self._paused(member.server, update)
        else:
            await self._idle(member, update)

    async def _paused(self, server: Server, update: Update) -> None:
        await server.pause(self._mode)
        await server.load(update)
        if self._flush:
            await server.flush()
        await server.resume()

    async def _idle(self, member: Member, update: Update) -> None:
        def idle() -> bool:
            return member.under_way == 0

        if not (self._mode == "drain" and await self._changed.wait_for(idle, self._drain_s)):
            await _repeat_until(idle, member.server.abort, self._changed, self._abort_s)
        await member.server.load(update)
        if self._flush:
            await member.server.flush()


async def _repeat_until(
    condition: Callable[[], bool], act: Callable[[], Awaitable[None]], changed: Signal, seconds: float
) -> None:
    for _ in range(int(seconds / ABORT_RETRY_S)):
        if condition():
            return
        await act()
        if await changed.wait_for(condition, ABORT_RETRY_S):
            return
    raise ServerFaultError(f"requests did not end within {seconds:g} s of being aborted")
