"""The fleet: many servers as one `Engine` (see base).

A turn goes on until it is whole, whatever updates, aborts and losses it meets: what it has is kept, except for the
tokens of a request whose server died, which are sampled anew; so a request asks for one segment of the turn at most.

The fleet's `version` is the newest that one of its servers has reached, and only servers that have reached it are given
requests. An update returns once the first server serves it; the others follow at their own pace, and a slow or dead one
holds nobody. Evaluations may have a server of their own meanwhile: see pins.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.actor.engine.base import EngineStats, Generation
from asyncrl.actor.engine.fleet.discovery import Discovery
from asyncrl.actor.engine.fleet.draft import Draft
from asyncrl.actor.engine.fleet.errands import END_S, Errands
from asyncrl.actor.engine.fleet.folders import Folders
from asyncrl.actor.engine.fleet.idle import IdleClock
from asyncrl.actor.engine.fleet.member import Member, Switch, label_of
from asyncrl.actor.engine.fleet.pins import Pins
from asyncrl.actor.engine.fleet.routing import Routes
from asyncrl.actor.engine.fleet.server import Server, ServerFaultError
from asyncrl.actor.engine.fleet.signal import Signal
from asyncrl.actor.engine.fleet.update import Update
from asyncrl.errors import EngineError, WeightsError
from asyncrl.types import NO_VERSION, Sampling
from asyncrl.weights.folders import Folder, Weights
from asyncrl.weights.manifest import check_covers
from asyncrl.weights.staging import CPU, staged
from asyncrl.weights.threads import in_own_thread

logger = logging.getLogger(__name__)

FOLDERS_S = 2.0
CLOSE_S = END_S + FOLDERS_S
"""`Fleet.close` takes no longer."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How the fleet goes about its servers.

    `attempts` server faults in a row without a new token fail a turn, as do `wait_s` without a server. Servers are
    looked for, and checked, every `check_s`. `salted` keeps the prefixes of versions apart in the servers' caches.
    A request asks for `segment_tokens` at most, or for its whole turn where that is 0.
    """

    attempts: int = 4
    wait_s: float = 600.0
    check_s: float = 5.0
    salted: bool = False
    segment_tokens: int = 0


class Fleet:
    """An engine over the servers that `discover` names, each opened by `open_server` and updated by `switch`.

    `expected` has names and shapes of the policy's tensors, `vocabulary` its size. `changed` is shared with `switch`.
    A version waits for its servers on the device `staging`, or as a folder in `folders`.
    """

    def __init__(
        self,
        discover: Discovery,
        open_server: Callable[[str], Server],
        switch: Switch,
        changed: Signal,
        *,
        expected: Mapping[str, tuple[int, ...]],
        vocabulary: int,
        rules: Rules | None = None,
        folders: Folders | None = None,
        staging: torch.device = CPU,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._discover = discover
        self._open_server = open_server
        self._switch = switch
        self._changed = changed
        self.expected = expected
        self._vocabulary = vocabulary
        self._rules = rules or Rules()
        self._folders = folders
        self._staging = staging
        self._members: dict[str, Member] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._routes = Routes()
        self._released: dict[str, asyncio.Future[None]] = {}
        self._target: Update | None = None
        self._version = NO_VERSION
        self._owner = uuid.uuid4().hex
        self._counts: Counter[str] = Counter()
        self._idle = IdleClock(clock)
        self._pins = Pins(clock)
        self._errands = Errands()

    @property
    def version(self) -> int:
        """The newest version that a server has reached; it never goes back."""
        self._version = max([self._version, *(member.version for member in self._members.values())])
        return self._version

    async def keep(self) -> None:
        """Find servers and keep them up to date; returns only by cancellation. Nothing is served without it."""
        while True:
            urls = await self._discover()
            if urls is not None:
                await self._have(dict.fromkeys(url.rstrip("/") for url in urls))
            await asyncio.sleep(self._rules.check_s)

    async def generate(
        self, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], session: str
    ) -> Generation:
        """As in the protocol. Raises EngineError also where servers fail again and again, or there is none."""
        self._check(tokens)
        if session in self._released:
            raise EngineError(f"session {session} is generating already; its turns come one after another")
        released = self._released[session] = asyncio.get_running_loop().create_future()
        self._idle.enter()
        draft = Draft(tokens, sampling, self._rules.segment_tokens)
        turn = asyncio.create_task(self._turn(draft, stop, session))
        try:
            await asyncio.wait((turn, released), return_when=asyncio.FIRST_COMPLETED)
            generation = turn.result() if turn.done() else draft.generation("abort")
        finally:
            turn.cancel()
            del self._released[session]
            self._idle.leave()
        self._counts["tokens"] += len(generation.tokens)
        return generation

    def release(self, session: str) -> None:
        self._routes.release(session)
        self._pins.release(session)
        if (released := self._released.get(session)) and not released.done():
            released.set_result(None)

    async def update_weights(self, version: int, weights: Weights) -> None:
        """As in the protocol; returns once the first server serves `version` or a newer one.

        `weights` are kept for servers that join later, and must stay as they are; a folder may go once this returns.
        Raises UnavailableError: the folder has gone.
        """
        newest = self._target.version if self._target else NO_VERSION
        if version <= newest:
            raise WeightsError(f"version {version} is not newer than {newest}, which the servers have or are getting")
        self._check_shapes(version, weights)
        # Servers go on generating meanwhile.
        ours = await in_own_thread(partial(self._made_ours, weights))
        self._target = Update(version, label_of(version, self._owner), ours, self._folders, self._staging)
        self._pins.offer(self._target)
        self._changed.notify()
        await self.wait_for_version(version)

    async def wait_for_version(self, version: int, pin: str | None = None) -> None:
        if pin is not None:
            self._pins.pin(pin, version, self._target)
        await self._changed.wait_for(lambda: self.version >= version)

    def stats(self) -> EngineStats:
        """As in the protocol; `counters` tell of segments, faults and servers."""
        members = list(self._members.values())
        counters = {
            "servers": len(members),
            "servers_ready": sum(member.ready for member in members),
            "servers_lent": int(self._lent() is not None),
            "server_faults": self._counts["left_faults"] + sum(member.faults for member in members),
            "server_updates": self._counts["left_updates"] + sum(member.updates for member in members),
            **{name: self._counts[name] for name in ("segments", "cut_segments", "lost_segments")},
        }
        return EngineStats(
            self._counts["tokens"], self._idle.seconds, self._idle.idle_seconds, self._idle.running, counters
        )

    async def close(self) -> None:
        """Part with all servers at once and remove the folders, within `CLOSE_S`: a server that has not ended its part
        by then is left as it is; a version that is still being written goes when that ends, before the process does."""
        # Servers that were still leaving are among the errands.
        late = await self._errands.end([self._part_from(url, 0.0) for url in self._members])
        if late:
            logger.warning("%d servers were not parted from in time", late)
        if self._folders is not None:
            try:
                await asyncio.wait_for(in_own_thread(self._folders.close), FOLDERS_S)
            except TimeoutError:
                logger.warning("a version is still being written; it is removed when that ends")

    def _check(self, tokens: NDArray[np.int32]) -> None:
        if not len(tokens):
            raise EngineError("there is nothing to continue: at least 1 token must be given")
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise EngineError(
                f"token ids must be from 0 to {self._vocabulary - 1}; got {tokens.min()} to {tokens.max()}"
            )

    def _check_shapes(self, version: int, weights: Weights) -> None:
        """Servers are not asked: SGLang ignores a name that it does not know, and dies of a wrong shape."""
        if isinstance(weights, Folder):
            weights.manifest.check_covers(self.expected)
        else:
            check_covers(version, {name: tuple(tensor.shape) for name, tensor in weights.items()}, self.expected)

    def _made_ours(self, weights: Weights) -> Weights:
        if not isinstance(weights, Folder):
            return staged(weights, self._staging)
        if self._folders is None:
            raise WeightsError(f"{weights.path} cannot be given to servers: weights.transports has no disk")
        return self._folders.hold(weights)

    async def _turn(self, draft: Draft, stop: Sequence[int], session: str) -> Generation:
        failures = 0
        while True:
            member = await self._home(session)
            rid = uuid.uuid4().hex
            self._counts["segments"] += 1
            try:
                segment = await member.generate(rid, draft.tokens, draft.sampling, stop, self._rules.salted)
            except ServerFaultError as fault:
                failures += 1
                self._counts["lost_segments"] += 1
                if failures >= self._rules.attempts:
                    raise EngineError(f"{failures} servers in a row failed, at last: {fault}") from fault
                continue
            except asyncio.CancelledError:
                self._errands.run(member.server.abort(rid))
                raise
            if draft.add(segment):
                return draft.generation()
            self._counts["cut_segments"] += segment.finish == "cut"
            failures = 0 if len(segment.tokens) or not member.ready else failures + 1
            if failures >= self._rules.attempts:
                raise EngineError(f"{member.server.url} aborted a request {failures} times without a token")

    async def _home(self, session: str) -> Member:
        """The member that serves the session, waited for."""
        found: list[Member] = []

        def find() -> bool:
            lent = self._lent()
            if lent is not None and self._pins.wants(session):
                member = self._routes.choose(session, [lent], NO_VERSION)
            else:
                member = self._routes.choose(
                    session, [each for each in self._members.values() if each is not lent], self.version
                )
            found.extend([member] if member else [])
            return member is not None

        if not await self._changed.wait_for(find, self._rules.wait_s):
            raise EngineError(f"no server was ready for {self._rules.wait_s:g} s; see the log for what is wrong")
        return found[0]

    async def _have(self, urls: Mapping[str, None]) -> None:
        for url in self._members.keys() - urls.keys():
            logger.info("%s leaves the fleet", url)
            self._errands.run(self._part_from(url, self._rules.wait_s))
        for url in urls.keys() - self._members.keys():
            member = Member(self._open_server(url), self._target_of, self._switch, self._changed, self._rules.check_s)
            self._members[url] = member
            self._keepers[url] = asyncio.create_task(member.keep())

    def _lent(self) -> Member | None:
        return self._pins.lent(self._members.values())

    def _target_of(self, member: Member) -> Update | None:
        return self._pins.update if member is self._lent() else self._target

    async def _part_from(self, url: str, grace_s: float) -> None:
        """Send the server nothing more; what it is working on may end within `grace_s`, unless an update is cut off."""
        member = self._members.pop(url)
        grace_s = grace_s if member.ready else 0.0
        self._counts["left_faults"] += member.faults
        self._counts["left_updates"] += member.updates
        keeper = self._keepers.pop(url)
        keeper.cancel()
        try:
            await asyncio.gather(keeper, return_exceptions=True)
            await self._changed.wait_for(lambda: member.under_way == 0, grace_s)
        finally:
            member.lose()
            await member.server.close()
