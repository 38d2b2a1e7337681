"""Limits on the requests that a reward function sends to a service: requests per minute, tokens per minute, and
simultaneous requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

MINUTE_S = 60.0


class AsyncTokenBucket:
    """Limits a rate: a call takes tokens, such as one for each request, and `rate_limit` tokens a second are added.

    The bucket is full at first, and holds at most `max_tokens`.
    """

    def __init__(
        self,
        rate_limit: float,
        max_tokens: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.rate_limit = rate_limit
        self.max_tokens = max_tokens or rate_limit
        self.tokens = self.max_tokens
        self._clock = clock
        self._sleep = sleep
        self._filled = clock()

    async def acquire(self, num_tokens: float = 1.0) -> None:
        """Take tokens, which may be more than the bucket holds, and wait until they are there.

        Calls are served in order. A call that is cancelled gives its tokens back.
        """
        now = self._clock()
        self.tokens = min(self.max_tokens, self.tokens + (now - self._filled) * self.rate_limit)
        self._filled = now
        # Below zero, the bucket owes tokens to calls that wait. The next call waits for theirs too.
        self.tokens -= num_tokens
        if self.tokens >= 0:
            return
        try:
            await self._sleep(-self.tokens / self.rate_limit)
        except asyncio.CancelledError:
            self.tokens += num_tokens
            raise


@dataclass(frozen=True)
class RequestLimits:
    """Limits of a service; None means no limit.

    - `max_concurrent`: requests at once
    - `max_rpm`: requests a minute
    - `max_tpm`: tokens a minute, of which each request takes `estimated_tokens_per_request`
    """

    max_concurrent: int = 1
    max_rpm: float | None = None
    max_tpm: float | None = None
    estimated_tokens_per_request: float = 2000


class RequestGate:
    """Lets requests through within `limits`. Several event loops of one thread may use it in turn."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._requests = _bucket(limits.max_rpm)
        self._tokens = _bucket(limits.max_tpm)
        # A semaphore belongs to the event loop in which calls first wait for it.
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait until a request is allowed. It counts as running until the body of the `async with` ends."""
        if self._requests is not None:
            await self._requests.acquire()
        if self._tokens is not None:
            await self._tokens.acquire(self._limits.estimated_tokens_per_request)
        loop = asyncio.get_running_loop()
        places = self._places.setdefault(loop, asyncio.Semaphore(self._limits.max_concurrent))
        async with places:
            yield


def _bucket(per_minute: float | None) -> AsyncTokenBucket | None:
    return None if per_minute is None else AsyncTokenBucket(per_minute / MINUTE_S)
