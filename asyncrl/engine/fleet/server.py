"""The protocol of one inference server: what the fleet needs of SGLang, vLLM or another one.

A server belongs to one actor. Each version of the weights has a label, which differs between actor processes. So
neither weights of another actor nor those that a restarted server read from its folder pass for ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import Alternatives, PlacedImage
from asyncrl.engine.fleet.update import Update
from asyncrl.errors import EngineError
from asyncrl.modelling.routing import RoutedTokens
from asyncrl.types import MAX_LOGPROB, Sampling


class ServerFaultError(EngineError):
    """The server failed. The request goes to another server, and this one gets none until it works again."""


WEIGHTS, CACHE = MEMORY = ("weights", "kv_cache")
"""The kinds of memory that a server can free for a while, as SGLang names them."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Span(msgspec.Struct, frozen=True, gc=False):
    """The sampled tokens [start, end) of one request, and the label of the weights that sampled them."""

    label: str = msgspec.field(name="version")
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The answer to one request, as the server gave it: tokens int32[G], logprobs float32[G], spans that should cover
    them in order (see `check_segment`).

    `finish` is stop (the last token is one of the request's stop ids, or under a grammar one of the server's), length
    (the request's limit, or the server's own), or cut (the request was interrupted and can be continued).

    `routing` has the experts of the tokens that were asked for, of prompt and answer; None where none came.
    `routing_fault` says why those that came are refused. `alternatives` are there where the server gave some.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: Sequence[Span]
    finish: str
    routing: RoutedTokens | None = None
    routing_fault: str = ""
    alternatives: Alternatives | None = None


def as_segment(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[Span],
    sampling: Sampling,
    stop: Sequence[int],
    reason: str,
) -> Segment:
    """The segment of a request with `sampling`, which the server ended for `reason`.

    The last token counts more than the reason. Servers also stop at end tokens that the model's own files name: if such
    a token is not in `stop`, the segment is cut, and the turn continues after it; under a grammar it has ended, since
    nothing may follow. An abort may arrive in the very step in which a request ends by itself.
    """
    finish = "length" if len(tokens) >= sampling.max_new_tokens or reason == "length" else "cut"
    if tokens and (tokens[-1] in stop or (sampling.grammar is not None and reason == "stop")):
        finish = "stop"
    return Segment(np.array(tokens, np.int32), np.array(logprobs, np.float32), spans, finish)


def check_segment(segment: Segment, vocabulary: int) -> None:
    """Raises ServerFaultError unless tokens, log-probs and spans fit together, and each token may have been sampled."""
    count, logprobs, spans = len(segment.tokens), segment.logprobs, segment.spans
    bounds = [0, *(span.end for span in spans)]
    if len(logprobs) != count or [span.start for span in spans] != bounds[:-1] or bounds[-1] != count:
        raise ServerFaultError(f"{count} tokens have {len(logprobs)} log-probs and the versions {spans}")
    if not count:
        return
    # A comparison with nan is false.
    if not (logprobs.min() > -np.inf and logprobs.max() <= MAX_LOGPROB):
        raise ServerFaultError("some log-probs are not finite, or above 0")
    if (largest := segment.tokens.max()) >= vocabulary:
        raise ServerFaultError(f"the server sampled token {largest}; the policy has ids up to {vocabulary - 1}")


class InferenceServer(Protocol):
    """One server. Every method raises ServerFaultError where the server fails."""

    url: str

    @property
    def precision(self) -> str:
        """What it computes in, as in `weights.canary.TOLERANCES`; known once it has joined."""

    @property
    def route(self) -> str:
        """The route of weights into it, for messages."""

    @property
    def spans(self) -> bool:
        """Whether the answer to a request that went on through an update says which version sampled which token."""

    @property
    def loads_behind_requests(self) -> bool:
        """Whether `load` may be called while requests end: it begins once all are answered, requests that come later
        wait for it, or for a part of it, and an answer has the update's label if it came behind any part."""

    async def join(self) -> None:
        """Find out what the server is, and end what an earlier actor left there: requests, a pause, half an update."""

    async def check(self) -> None:
        """Raises ServerFaultError unless it answers and has the weights that it was given last."""

    async def generate(
        self,
        rid: str,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        salt: str | None,
        routed_from: int | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Segment:
        """Continue `tokens` under the name `rid`; `salt` keeps the prefix cache of one version from another's. With
        `routed_from` the answer should have the experts of all tokens from there on, but the last one, which computed
        nothing yet. Only servers that take images are given `images`, which stand among the tokens.

        Raises EngineError: the request itself is refused, so that no server would take it.
        """

    async def logprobs(
        self, tokens: Sequence[int], salt: str | None, start: int = 1, images: Sequence[PlacedImage] = ()
    ) -> NDArray[np.float32]:
        """The log-probs float32[T - start] of `tokens` from `start` on, which is 1 or more, at temperature 1, without a
        grammar and with the weights that were loaded last. `images` are as for `generate`, and stand before `start`.
        Raises EngineError also where the server refuses such a request."""

    async def abort(self, rid: str | None = None) -> None:
        """End a request, or all of them: each answers with the tokens that it has."""

    async def pause(self, mode: str) -> None:
        """Stop between two decoding steps, in `mode` in_place or retract; retract where the server could not tell after
        an in_place pause which version sampled which token. Called only where `spans` is true."""

    def retracts(self, mode: str) -> bool:
        """Whether a pause in `mode` takes from requests the keys and values of the tokens that they have sampled."""

    async def resume(self) -> None: ...

    async def prepare(self, update: Update) -> None:
        """Make ready what `load` needs of the update; requests go on meanwhile."""

    async def load(self, update: Update) -> None:
        """Take the whole update. The server is idle or paused, unless it `loads_behind_requests`; after a fault its
        weights are unknown."""

    async def flush(self) -> None:
        """Forget the prefix cache. The server is idle, or paused with all requests retracted; it may be loading."""

    async def leave(self) -> None:
        """End what joining and loading set up on the server, such as process groups."""

    async def close(self) -> None:
        """Close all connections; it waits for nothing. Calls that go on fail."""


class FreeingServer(InferenceServer, Protocol):
    """A server that can share its GPUs with the learner."""

    async def free(self, memory: Sequence[str]) -> None:
        """Free the memory of these kinds, of `MEMORY`; what is in it is lost. The server is idle, and has all of it."""

    async def regain(self, memory: Sequence[str]) -> None:
        """Have memory of these kinds again, which was freed."""
