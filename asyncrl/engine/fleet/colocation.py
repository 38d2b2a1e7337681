"""Lets servers and the learner have the same GPUs, one after the other (cluster.colocated; machine/gpu_lock.py has the
locks). A period is the time in which one of the two sides has them.

    learner's period ──lock taken──► our period ──learner requests──► ending ──memory freed──► learner's period

Invariants:

- A server's process is started only in our period, which is the servers' period. If the learner requests the GPUs
  meanwhile, it waits until the process has started.
- In `ending`, each endpoint ends its requests, and its server frees weights and cache. Assistant messages whose
  generation this interrupts are continued when the servers have the GPUs again. A server that fails to free its memory,
  or takes longer than `RELEASE_S`, is killed, since it may still have memory.
- The lock is given back once each process has freed its memory or has ended. Processes inherit the lock: if their actor
  is killed, they keep it until they end.
- After the learner's period, a server's weights are lost. The server allocates memory for them, loads a whole version,
  and then allocates memory for its cache and gets requests. If this fails, the server is killed and started again.
- If the learner dies in any state, its request ends: a period of the servers begins, and the servers load the version
  that the actor has. The learner's next process requests the GPUs before it loads anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from asyncrl.engine.fleet.condition import Condition
from asyncrl.engine.fleet.server import CACHE, MEMORY, WEIGHTS, FreeingServer, ServerFaultError
from asyncrl.engine.fleet.update import Update
from asyncrl.machine.gpu_lock import ServersLock

logger = logging.getLogger(__name__)

POLL_S = 0.05
RELEASE_S = 180.0
"""Seconds in which a server must end its requests and free its memory."""


class ServerProcess(Protocol):
    """The process of a server. It is started again after it has ended."""

    url: str
    starts: int
    """The number of times that the process was started so far."""
    answering: bool
    freed: bool
    """True if the process has freed its GPU memory."""

    @property
    def running(self) -> bool: ...

    def end(self) -> None:
        """Kill the process, if it runs."""


class GpuSharing:
    """The periods in which an actor's servers have the shared GPUs. `changed` is called when such a period begins, and
    when it must end."""

    def __init__(
        self, lock: ServersLock, release_s: float = RELEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ours = False
        self.version = lock.version()
        """The version that the learner published before our period. The servers wait for it."""
        self.changed: Callable[[], None] = lambda: None
        self.lock = lock
        self._release_s = release_s
        self._clock = clock
        self._servers: dict[str, ServerProcess] = {}
        self._condition = Condition()
        self._began: float | None = None
        self._counts = {"gpu_periods": 0.0, "gpu_release_s": 0.0, "gpu_resume_s": 0.0}

    def add(self, server: ServerProcess) -> None:
        self._servers[server.url] = server

    def process(self, url: str) -> ServerProcess:
        """The process of the server at `url`."""
        return self._servers[url]

    def counters(self) -> dict[str, float]:
        """Counts since the actor started: the servers' periods, the seconds from the learner's requests to the return
        of the lock, and the seconds from the beginning of periods to the first ready server.
        """
        return dict(self._counts)

    async def begun(self) -> None:
        """Wait for our period. It lasts at least until the caller's next await."""
        await self._condition.wait_for(lambda: self.ours)

    def resumed(self) -> None:
        """Record that a server is ready."""
        if self._began is not None:
            self._counts["gpu_resume_s"] += self._clock() - self._began
            self._began = None

    async def keep(self) -> None:
        """Begin and end periods; returns only by cancellation."""
        while True:
            while not self.lock.take():
                await asyncio.sleep(POLL_S)
            self._counts["gpu_periods"] += 1
            self._began, self.version = self._clock(), self.lock.version()
            self._set(True)
            while not self.lock.is_wanted():
                await asyncio.sleep(POLL_S)
            asked, self._began = self._clock(), None
            self._set(False)
            await self._all_free()
            # `_all_free` has not awaited anything since its last check, so no process has been started meanwhile.
            self.lock.give_back()
            self._counts["gpu_release_s"] += self._clock() - asked

    def _set(self, ours: bool) -> None:
        self.ours = ours
        self._condition.notify_all()
        self.changed()

    async def _all_free(self) -> None:
        """Wait until no process has GPU memory. Kill processes that take too long."""
        since: dict[str, float] = {}
        while held := [each for each in self._servers.values() if each.running and not each.freed]:
            for server in held:
                if not server.answering:
                    since.pop(server.url, None)  # The server is starting, which has its own time limit.
                elif self._clock() - since.setdefault(server.url, self._clock()) > self._release_s:
                    logger.error("%s has not freed its memory within %g s; it is killed", server.url, self._release_s)
                    server.end()
            await asyncio.sleep(POLL_S)


class ServerMemory:
    """The GPU memory of `server`, which uses its GPUs only in the periods of `sharing`."""

    def __init__(self, server: FreeingServer, sharing: GpuSharing) -> None:
        self._server = server
        self._sharing = sharing
        self._freed: set[str] = set()
        self._freed_by = 0

    async def free(self) -> None:
        """Free all memory of the idle server. Raises ServerFaultError: the server failed."""
        process = self._sharing.process(self._server.url)
        # A server that refuses a flush still has requests in its queues, and would crash if it freed its memory.
        await self._server.flush()
        self._freed_by, freeing = process.starts, [each for each in MEMORY if each not in self._freed]
        self._freed.update(freeing)
        await self._server.free(freeing)
        process.freed = True

    async def regain_weights(self) -> None:
        """Let the server allocate memory for weights, in our period. Raises ServerFaultError: the server failed."""
        process = self._sharing.process(self._server.url)
        if process.starts != self._freed_by or not process.running:
            self._freed.clear()
            raise ServerFaultError(f"{self._server.url} ended while the learner had its GPUs")
        process.freed = False
        await self._server.regain([WEIGHTS])
        self._freed.discard(WEIGHTS)

    async def regain_cache(self, update: Update) -> None:
        """Let the server, which has loaded `update`, allocate memory for its cache if the cache was freed. Raises
        ServerFaultError: the server failed."""
        if self._freed:
            update.drop_copies()
            await self._server.regain([CACHE])
            self._freed.clear()

    def give_up(self) -> None:
        """End the server's process if it failed after freeing memory and before it had allocated all of it again."""
        if self._freed:
            process = self._sharing.process(self._server.url)
            # The process that freed memory may have ended, so that the call to its server failed. A process that was
            # started in its place must not be killed.
            if process.starts == self._freed_by:
                process.end()
        self._freed.clear()
