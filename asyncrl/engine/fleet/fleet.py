"""The fleet: many servers as one `Engine` (see base).

The fleet's `version` is the newest version that one of its servers has reached, and only servers that have reached it
get requests. An update returns once the first server serves the new version. The remaining servers follow
independently, so a slow or dead server delays no request. Meanwhile a server with the older version may be leased to
evaluations: see assignment.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import EngineStats, Generation, IdleClock, PlacedImage, check_ids
from asyncrl.engine.fleet.assignment import Assignment, EvaluationLease
from asyncrl.engine.fleet.colocation import GpuSharing
from asyncrl.engine.fleet.completion import TurnCompletion
from asyncrl.engine.fleet.condition import Condition
from asyncrl.engine.fleet.discovery import Discovery
from asyncrl.engine.fleet.endpoint import Endpoint
from asyncrl.engine.fleet.folders import Folders
from asyncrl.engine.fleet.in_flight import interrupt
from asyncrl.engine.fleet.partial_turn import PartialTurn
from asyncrl.engine.fleet.pauses import PushPauses
from asyncrl.engine.fleet.server import InferenceServer
from asyncrl.engine.fleet.settings import FleetSettings
from asyncrl.engine.fleet.update import Update
from asyncrl.engine.sampling import request_seed
from asyncrl.errors import EngineError, WeightsError
from asyncrl.observe.spans import NoSpans, Spans
from asyncrl.types import NO_VERSION, Sampling
from asyncrl.weights.canary import CanaryCheck, CanaryError, CanaryJudge
from asyncrl.weights.folders import Folder, Weights
from asyncrl.weights.manifest import check_covers
from asyncrl.weights.threads import in_own_thread

logger = logging.getLogger(__name__)


class Fleet:
    """An engine over the servers that `discover` names, each opened by `open_server`.

    - `expected` has names and shapes of the policy's tensors; the policy's token ids are less than `vocabulary`.
    - `folders` holds versions for servers that load folders: links to the learner's folders, and versions that this
      process writes.
    - With `sharing` the servers share their GPUs with the learner.
    - `spans` records each segment, and each time that a push stops a server.
    - With `routed`, generations have the experts of their tokens.
    - `marks` are the placeholders of images.
    - `loads` gives metrics of the servers that this process started: their load and their hangs.
    - `heard` is called with the URL of a server after an attempt to join it (see `Endpoint`).
    """

    def __init__(
        self,
        discover: Discovery,
        open_server: Callable[[str], InferenceServer],
        *,
        expected: Mapping[str, tuple[int, ...]],
        vocabulary: int,
        settings: FleetSettings | None = None,
        folders: Folders | None = None,
        sharing: GpuSharing | None = None,
        clock: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
        routed: bool = False,
        marks: Sequence[int] = (),
        loads: Callable[[], Mapping[str, float]] = dict,
        heard: Callable[[str, bool], None] = lambda url, joined: None,
    ) -> None:
        self._marks = marks
        self._loads = loads
        self._heard = heard
        self._spans = spans or NoSpans()
        self._discover = discover
        self._open_server = open_server
        self.expected = expected
        self._vocabulary = vocabulary
        self._settings = settings or FleetSettings()
        self._folders = folders
        self._endpoints: dict[str, Endpoint] = {}
        self._leaving: dict[asyncio.Task[None], Endpoint] = {}
        self._assignment = Assignment()
        self._completion = TurnCompletion(self._ready, self._assignment.release, self._spans, self._settings, routed)
        self._lease = EvaluationLease(clock)
        self._turns: dict[str, asyncio.Timeout] = {}
        self._newest: Update | None = None
        self._version = NO_VERSION
        self._owner = uuid.uuid4().hex
        self._counts: Counter[str] = Counter()
        self._pauses = PushPauses(clock, self._spans)
        self._idle = IdleClock(clock)
        self._changed = Condition()
        self._shared = sharing
        if sharing is not None:
            sharing.changed = self._on_change

    @property
    def version(self) -> int:
        """The newest version that a server has reached; it never goes back."""
        return self._version

    @property
    def takes_grammars(self) -> bool:
        return True

    async def keep(self) -> None:
        """Find servers and keep them up to date; returns only by cancellation. Requests are served only while
        `keep` runs."""
        while True:
            urls = await self._discover()
            if urls is not None:
                self._set_urls(dict.fromkeys(url.rstrip("/") for url in urls))
            self._on_change()
            await asyncio.sleep(self._settings.check_s)

    async def generate(
        self,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        session: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Continue `tokens` (see `Engine`). Raises EngineError also if servers fail repeatedly, or no server is
        ready."""
        check_ids(tokens, self._vocabulary)
        if session in self._turns:
            raise EngineError(f"session {session} is generating already; its turns come one after another")
        known, marks = self._completion.routed_from(session, len(tokens)), self._marks if images else ()
        sampling = replace(sampling, seed=request_seed(self._settings.seed, session))
        turn = PartialTurn(tokens, sampling, self._settings.segment_tokens, known, marks)
        # `release` ends the turn through this scope.
        scope = self._turns[session] = asyncio.timeout(None)
        self._idle.busy()
        try:
            async with scope:
                await self._completion.complete(turn, stop, session, images)
            generation = turn.generation()
        except TimeoutError:
            generation = turn.generation("abort")
        finally:
            del self._turns[session]
            if not self._turns:
                self._idle.idle()
            if is_released := scope.when() is not None:
                # An answer that came at the same moment may have recorded data for the released session.
                self._forget(session)
        self._counts["tokens"] += len(generation.tokens)
        if not is_released:
            self._completion.keep(session, turn)
        return generation

    def release(self, session: str) -> None:
        self._forget(session)
        self._lease.release(session)
        if session in self._turns:
            interrupt(self._turns[session])

    def _forget(self, session: str) -> None:
        """Forget the session's server, and the prefix that this server has computed."""
        self._assignment.release(session)
        self._completion.forget(session)

    async def update_weights(self, version: int, weights: Weights, check: CanaryCheck | None = None) -> None:
        """Offer `version` to all servers (see `Engine`); return once a server has this version or a newer one.

        A server that fails the `check` of this version is lost until it passes the check of this or a newer version. If
        all servers are lost, this raises CanaryError. The servers keep trying. The next call may offer a newer version,
        or the same version as it arrived by another route.

        `weights` are kept for servers that join later, and must not change; a folder may be removed once this returns.
        Raises UnavailableError: the folder has been removed already.
        """
        newest = self._newest.version if self._newest else NO_VERSION
        if version < newest or version <= self._version:
            raise WeightsError(f"version {version} is not newer than {newest}, which the servers have or are getting")
        if version == newest and self._folders is not None:
            # The servers refused this version as the first route brought it. The weights from a second route may be
            # undamaged, so servers must not load the folder with the first route's weights.
            await in_own_thread(partial(self._folders.discard, version))
        await self._offer(version, weights, check)
        before = {url: endpoint.updater.refused.get(version, 0) for url, endpoint in self._endpoints.items()}
        await self._changed.wait_for(lambda: self._version >= version or self._all_refuse(version, before))
        if self._version < version:
            raise CanaryError(f"no server is left for version {version}{self._last_fault()}")

    async def _offer(self, version: int, weights: Weights, check: CanaryCheck | None) -> None:
        if check is not None:
            check.canary.check_ids(self._vocabulary)
        # Names and shapes are checked here, since servers do not check them: SGLang ignores an unknown name, and a
        # wrong shape crashes it.
        if isinstance(weights, Folder):
            assert self._folders is not None
            weights.manifest.check_covers(self.expected)
            weights = await in_own_thread(partial(self._folders.hold, weights))
        else:
            check_covers(version, {name: tuple(tensor.shape) for name, tensor in weights.items()}, self.expected)
        self._newest = Update(version, f"{version}-{self._owner}", weights, self._folders, check)
        self._lease.offer(self._newest)
        self._on_change()

    def _all_refuse(self, version: int, before: Mapping[str, int]) -> bool:
        """True if all servers except the leased one are lost or had to put `version` off, and one of them has failed
        the canary of `version` since the update began. `before` maps the url of each server to its number of failures
        before the update.
        """
        asked = {url: each for url, each in self._endpoints.items() if each is not self._lease.endpoint}
        refuses = any(each.updater.refused.get(version, 0) > before.get(url, 0) for url, each in asked.items())
        return refuses and all(each.fails(version) for each in asked.values())

    async def wait_for_version(self, version: int, pin: str | None = None) -> None:
        if pin is not None:
            self._lease.pin(pin, version)
            if self._newest is not None:
                self._lease.offer(self._newest)
            self._on_change()
        await self._changed.wait_for(lambda: self._version >= version)

    def stats(self) -> EngineStats:
        """The statistics of the fleet (see `Engine`). `counters` counts segments, faults and servers."""
        counters = {
            "servers": len(self._endpoints),
            "servers_ready": sum(endpoint.ready for endpoint in self._endpoints.values()),
            "servers_leased": int(self._lease.endpoint is not None),
            **{name: self._counts[name] for name in ("server_faults", "server_updates")},
            **self._completion.counters,
            **self._pauses.counters,
            **self._canary_counters(),
            **(self._shared.counters() if self._shared is not None else {}),
            **self._loads(),
        }
        return EngineStats(self._counts["tokens"], *self._idle.read(), len(self._turns), counters)

    def _canary_counters(self) -> dict[str, float]:
        """The canary's results at the server whose log-probs differ most, and the number of failed canaries of all
        servers together."""
        judges = [endpoint.updater.canary for endpoint in self._endpoints.values()] or [CanaryJudge()]
        worst = max(judges, key=lambda judge: judge.difference)
        return {**worst.counters, "canary_failures": self._counts["canary_failures"]}

    async def close(self) -> None:
        """Leave all servers at once and remove the folders, within `close_s`.

        Servers that have not answered by then are left as they are. A version that is still being written is removed
        later, before the process ends.
        """
        deadline = asyncio.get_running_loop().time() + self._settings.close_s
        for url in list(self._endpoints):
            self._leave(url, 0.0)
        for endpoint in self._leaving.values():
            endpoint.lose()
        if self._leaving:
            _, late = await asyncio.wait(self._leaving, timeout=self._settings.close_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            if late:
                logger.warning("%d servers did not answer in time, and are left as they are", len(late))
        if self._folders is not None:
            removal = asyncio.ensure_future(in_own_thread(self._folders.close))
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            if not (await asyncio.wait([removal], timeout=left_s))[0]:
                logger.warning("the folders of weights are not removed yet; they will be before the process ends")

    async def _ready(self, session: str) -> Endpoint:
        """Wait for an endpoint that can serve the session. Raises EngineError: no endpoint is ready for `wait_s`
        seconds. The time in which the learner has the shared GPUs does not count.
        """
        wait_s = self._settings.wait_s
        if not self._rests() and (ready := self._assign(session)) is not None:
            return ready
        while True:
            await self._changed.wait_for(lambda: not self._rests())
            found = await self._changed.wait_for(lambda: self._assign(session) or self._rests(), wait_s)
            if isinstance(found, Endpoint):
                return found
            if not found:
                raise EngineError(
                    f"no server was ready for {wait_s:g} s{self._last_fault()}; see the log for the reason"
                )

    def _assign(self, session: str) -> Endpoint | None:
        """The endpoint that can serve the session now, or None."""
        leased, update = self._lease.endpoint, self._lease.update
        if leased is not None and update is not None and self._lease.covers(session):
            # The leased endpoint may serve an older version until it has loaded the pinned version.
            return self._assignment.assign(session, [leased], update.version)
        others = [endpoint for endpoint in self._endpoints.values() if endpoint is not leased]
        return self._assignment.assign(session, others, self._version)

    def _last_fault(self) -> str:
        faults = [endpoint.fault for endpoint in self._endpoints.values() if endpoint.fault]
        return f" (the fault of one: {faults[0]})" if faults else ""

    def _set_urls(self, urls: Mapping[str, None]) -> None:
        for url in self._endpoints.keys() - urls.keys():
            logger.info("%s leaves the fleet", url)
            self._leave(url, self._settings.wait_s)
        for url in urls.keys() - self._endpoints.keys():
            self._endpoints[url] = Endpoint(
                self._open_server(url),
                self._target_of,
                self._on_change,
                self._vocabulary,
                self._counts,
                self._pauses,
                self._settings,
                self._shared,
                self._rests,
                self._heard,
            )

    def _leave(self, url: str, grace_s: float) -> None:
        endpoint = self._endpoints.pop(url)
        task = asyncio.create_task(endpoint.leave(grace_s))
        self._leaving[task] = endpoint
        task.add_done_callback(self._leaving.pop)

    def _rests(self) -> bool:
        """True in the learner's period on the GPUs, and after it until the version that the learner published
        meanwhile has arrived."""
        # If the newest version that has arrived is on no server yet, the servers do not rest: the actor fetches the
        # next version only once a server has this one.
        if self._shared is None:
            return False
        newest = self._newest.version if self._newest is not None else NO_VERSION
        return not self._shared.ours or (newest < self._shared.version and newest <= self._version)

    def _target_of(self, endpoint: Endpoint) -> Update | None:
        return self._lease.update if endpoint is self._lease.endpoint else self._newest

    def _on_change(self) -> None:
        """React to a change of an endpoint, or of the weights that endpoints should have."""
        endpoints = self._endpoints.values()
        self._version = max([self._version, *(endpoint.proved for endpoint in endpoints)])
        if self._shared is not None and any(endpoint.ready for endpoint in endpoints):
            self._shared.resumed()
        self._lease.renew(endpoints)
        for endpoint in endpoints:
            if endpoint.lost:
                self._completion.lose(endpoint.server.url)
        self._changed.notify_all()
        for endpoint in endpoints:
            endpoint.notify()
