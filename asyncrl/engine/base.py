"""The protocol of an engine: token ids in; token ids, log-probs and policy versions out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.errors import EngineError
from asyncrl.types import Sampling

if TYPE_CHECKING:  # These import torch, for which an episode without a model should not wait.
    from asyncrl.modelling.routing import RoutedTokens
    from asyncrl.weights.canary import CanaryCheck
    from asyncrl.weights.folders import Weights


class Alternatives(NamedTuple):
    """The k most likely tokens at each of G positions, the most likely first: `tokens` int32[G, k], and `logprobs`
    float32[G, k]."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class PlacedImage(NamedTuple):
    """An image at the tokens [start, end): its digest as `name`, and the bytes of its file as `data`."""

    start: int
    end: int
    name: bytes
    data: bytes


def collapsed(tokens: NDArray[np.int32], images: Sequence[PlacedImage]) -> NDArray[np.int32]:
    """Reduce each image's placeholders in `tokens` to the single placeholder that the chat template writes."""
    if not images:
        return tokens
    kept = np.ones(len(tokens), np.bool_)
    for image in images:
        kept[image.start + 1 : image.end] = False
    return tokens[kept]


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """The sampled tokens int32[G] with their logprobs float32[G] and versions int32[G].

    - Log-probs are at the sampling temperature, or at temperature 1 if the sampling temperature is 0.
    - `finish_reason` is stop (the last token is a stop id), length, or abort (the call ended early).
    - `grammar_mass` float32[G], for sampling under a grammar: see Trajectory.
    - `routing` has the experts that computed the sequence's tokens, prompt included. It leaves out tokens whose experts
      an earlier call of the session returned.
    - `alternatives` are set if they were requested and the engine reports them.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: str
    grammar_mass: NDArray[np.float32] | None = None
    routing: Sequence[RoutedTokens] = ()
    alternatives: Alternatives | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was opened, and the current number of requests.

    - `tokens`: the number of sampled tokens
    - `seconds`: the time since the engine was opened; `idle_seconds`: the part of this time without any request
    - `running`: the current number of requests
    - `counters`: further counts, which depend on the kind of engine
    """

    tokens: int
    seconds: float
    idle_seconds: float
    running: int
    counters: Mapping[str, float] = field(default_factory=dict)


class IdleClock:
    """Adds up the seconds without any request; `clock` gives seconds. One thread calls `idle` and `busy`; any thread
    may call `read`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        # One tuple has the total seconds of past idle times, and the beginning of the current idle time. So a thread
        # never reads an old value of one together with a new value of the other.
        self._state: tuple[float, float | None] = (0.0, self._started)

    def read(self) -> tuple[float, float]:
        """The seconds since this object was made, and the idle seconds among them."""
        now, (idle, since) = self._clock(), self._state
        return now - self._started, idle if since is None else idle + now - since

    def idle(self) -> None:
        """Begin idle time: there is no request from now on."""
        idle, since = self._state
        self._state = (idle, self._clock() if since is None else since)

    def busy(self) -> None:
        """End idle time: there is a request from now on."""
        self._state = (self.read()[1], None)


def check_ids(tokens: NDArray[np.int32], vocabulary: int) -> None:
    """Raises EngineError: `tokens` is empty, or an id lies outside the policy's vocabulary."""
    if not len(tokens):
        raise EngineError("there is nothing to continue: at least 1 token must be given")
    # As an unsigned number, a negative id is larger than every vocabulary. So one comparison finds negative ids and ids
    # that are too large.
    if np.maximum.reduce(tokens.view(np.uint32)) >= vocabulary:
        raise EngineError(f"token ids must be from 0 to {vocabulary - 1}; got {tokens.min()} to {tokens.max()}")


class Engine(Protocol):
    """Continuous generation for many concurrent callers on one asyncio loop."""

    @property
    def version(self) -> int:
        """The policy version that the engine serves now; -1 before the first weights have arrived."""

    @property
    def takes_grammars(self) -> bool:
        """True if the engine can sample under a grammar."""

    async def generate(
        self,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        session: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Continue `tokens`, which contain placeholders of `images`. Calls of one `session` share a growing prefix,
        which an engine may cache.

        Raises EngineError: the tokens do not fit, an id lies outside the vocabulary, or the engine takes no images.
        """

    def release(self, session: str) -> None:
        """End the session: its cache may be freed, and its running generation returns with `finish_reason` abort."""

    async def update_weights(self, version: int, weights: Weights, check: CanaryCheck | None = None) -> None:
        """Switch to `version` between two decoding steps, all or nothing, while requests continue.

        Raises WeightsError (and changes nothing): names or shapes differ from the model's, or `version` is not newer.
        Raises CanaryError: with the new weights, the engine fails `check`, which compares its log-probs with the
        learner's. A fleet continues with the servers that pass the check.
        """

    async def wait_for_version(self, version: int, pin: str | None = None) -> None:
        """Return once the engine serves `version` or a newer version.

        `pin` has an effect only if the engine can serve two versions at once, as a fleet of several servers can. Then
        the session `pin` and all sessions `pin`/NAME get exactly this version until `pin` is released.
        """

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
