"""The engine's side of a push: waits for each new version, fetches it, and switches the engine to it atomically.

These rules hold for every route:

- Before the first byte is taken, the manifest is checked: it must cover exactly the engine's tensors.
- The engine gets only tensors that arrived whole and with the right checksums, or a folder whose header is right.
- A version never moves backwards. After a failure the engine stays at its version; the failure is logged and counted.
- After a failure the next route is tried at once. After the last route, the first is tried again after a wait.
- An update also fails if the engine does not repeat the learner's log-probs of the version's canary, a short fixed
  sequence (see canary.py).

The engine keeps generating while weights arrive in other memory, and stops only to switch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from asyncrl.errors import UnavailableError, WeightsError, WireError
from asyncrl.observe.spans import NoSpans, Spans, Value
from asyncrl.weights.canary import CanaryCheck, CanaryError
from asyncrl.weights.folders import Weights
from asyncrl.weights.manifest import Manifest

CANARY_FAILURES = 5
"""The receiver ends after this many failed canaries in a row: if weights that arrived whole fail, only a new process or
a person can help."""
AWAY_S = 1.0
"""The maximum wait in seconds after all routes were tried and none of them reached the learner."""

logger = logging.getLogger(__name__)


class ExcludedError(UnavailableError):
    """This engine can never get weights by this route."""


class OpenRoute(Protocol):
    """The engine's end of a route. Its methods raise UnavailableError, WireError or WeightsError."""

    name: str
    """The route's name in `weights.to_engines`."""

    endpoint: str
    received: int
    """The number of bytes of weights that came by this route."""

    async def newer_than(self, version: int) -> Manifest | None:
        """Return the newest manifest as soon as it is newer than `version`, or None after about a second."""
        ...

    async def fetch(self, manifest: Manifest) -> Weights:
        """Return all tensors of the manifest, with verified checksums, or the folder that has them."""
        ...

    def reset(self) -> None:
        """Drop the running transfer. The next call starts a new one."""
        ...


class UpdatableEngine(Protocol):
    """The part of an engine that the receiver uses (see engine/base.py)."""

    @property
    def version(self) -> int:
        """The version that the engine serves."""
        ...

    async def update_weights(self, version: int, weights: Weights, check: CanaryCheck | None = None) -> None:
        """Switch to `version`, all or nothing. Raises WeightsError: the engine cannot take the weights; CanaryError:
        `check` fails."""
        ...


class Receiver:
    """Follows the first of `routes` that works, for an engine whose tensors have the names and shapes in `expected`.

    `retry_s` is the wait after all routes failed to bring a version. If none of them reached the learner, the wait is
    at most a second. `canary_tolerance` goes to `CanaryCheck`. `spans` records each transfer and each switch.
    """

    def __init__(
        self,
        routes: Sequence[OpenRoute],
        expected: Mapping[str, tuple[int, ...]],
        *,
        retry_s: float = 5.0,
        canary_tolerance: float | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._spans = spans or NoSpans()
        self._routes = list(routes)
        self._expected = expected
        self._retry_s = retry_s
        self._canary_tolerance = canary_tolerance
        self._canary_failures = 0
        self.updates = 0
        self.refused = 0
        self.fallbacks = 0
        self._transfer_s = 0.0
        self._switch_s = 0.0

    def counters(self) -> dict[str, float]:
        """Return counts since the start: versions taken and refused, versions that came by another route than the
        first, bytes, seconds of transfers (during which the engine generates), and seconds of switches.
        """
        return {
            "weights_updates": self.updates,
            "weights_refused": self.refused,
            "weights_fallbacks": self.fallbacks,
            "weights_bytes": sum(route.received for route in self._routes),
            "weights_transfer_s": self._transfer_s,
            "weights_switch_s": self._switch_s,
        }

    async def run(self, engine: UpdatableEngine) -> None:
        """Update `engine` whenever there is a newer version, until this task is cancelled. Raises CanaryError: the
        engine failed its canary CANARY_FAILURES times in a row.
        """
        endpoints = ", else ".join(f"{route.name} at {route.endpoint}" for route in self._routes)
        logger.info("waiting for weights newer than version %d from %s", engine.version, endpoints)
        try:
            while True:
                await self._attempt(engine)
        finally:
            for route in self._routes:
                route.reset()

    async def _attempt(self, engine: UpdatableEngine) -> None:
        failures: list[str] = []
        damaged = False
        for route in list(self._routes):
            try:
                return await self._update(engine, route, failures)
            except ExcludedError as error:
                logger.info("weights do not come by %s: %s", route.name, error)
                self._routes.remove(route)
            except CanaryError as error:
                self._canary_failures += 1
                if self._canary_failures >= CANARY_FAILURES:
                    raise CanaryError(f"{error}. This was failure {self._canary_failures} in a row") from error
                failures.append(f"not by {route.name}: {error}")
                damaged = True
            except (UnavailableError, WeightsError, WireError) as error:
                failures.append(f"not by {route.name}: {error}")
                damaged |= not isinstance(error, UnavailableError)
            route.reset()
        reasons = "; ".join(failures)
        if damaged:
            self.refused += 1
            logger.error("no new weights, the engine stays at version %d: %s", engine.version, reasons)
        else:
            logger.warning("waiting for the learner: %s", reasons)
        await asyncio.sleep(self._retry_s if damaged else min(AWAY_S, self._retry_s))

    async def _update(self, engine: UpdatableEngine, route: OpenRoute, failures: Sequence[str]) -> None:
        manifest = await route.newer_than(engine.version)
        if manifest is None:
            return
        manifest.check_covers(self._expected)
        begun = time.perf_counter()
        about: dict[str, Value] = {"version": manifest.version, "bytes": manifest.nbytes, "by": route.name}
        with self._spans.span("transfer", "weights", **about):
            weights = await route.fetch(manifest)
        arrived = time.perf_counter()
        if failures:
            self.fallbacks += 1
            logger.warning("version %d came by %s, %s", manifest.version, route.name, "; ".join(failures))
        check = None
        if manifest.canary is not None:
            check = CanaryCheck(manifest.version, manifest.canary, route.name, self._canary_tolerance)
        with self._spans.span("switch", "weights", **about):
            await engine.update_weights(manifest.version, weights, check)
        self._canary_failures = 0
        self.updates += 1
        self._transfer_s += arrived - begun
        self._switch_s += time.perf_counter() - arrived
        logger.info("the engine serves version %d (%.1f MB)", manifest.version, manifest.nbytes / 1e6)
