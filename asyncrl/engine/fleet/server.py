"""The fleet's protocol of one inference server: SGLang, vLLM or another one.

A server belongs to one actor. Each version of the weights has a label, which differs between actor processes. The label
shows if a server has weights from another actor, or, after a restart, only the weights of its model's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import Alternatives, PlacedImage
from asyncrl.engine.fleet.update import Update
from asyncrl.errors import EngineError
from asyncrl.modelling.routing import RoutedTokens
from asyncrl.types import MAX_LOGPROB, Sampling


class ServerFaultError(EngineError):
    """The server failed. The request goes to another server, and this server gets no requests until it works again."""


class ServerSilentError(ServerFaultError):
    """The server did not answer in time."""


WEIGHTS, CACHE = MEMORY = ("weights", "kv_cache")
"""The kinds of memory that a server can free temporarily, by their names in SGLang."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Span(msgspec.Struct, frozen=True, gc=False):
    """The sampled tokens [start, end) of one request, and the label of the weights that sampled them."""

    label: str = msgspec.field(name="version")
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The unchecked answer to one request: tokens int32[G] with logprobs float32[G].

    - `spans`: the label of each token's weights; `check_segment` checks that the spans cover the tokens in order
    - `routing`: the requested experts of prompt and answer tokens, or None
    - `routing_fault`: the reason why experts are refused; empty if none are refused
    - `alternatives`: the requested alternatives; None if the server gave none

    `finish` is one of these:

    - stop: the last token is one of the request's stop ids, or under a grammar one of the server's own stop ids
    - length: the request's or the server's limit of tokens is reached
    - cut: the request was interrupted and can be continued
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
    """Make the segment of a request with the settings `sampling`. The server ended the request for `reason`.

    If the last token is in `stop`, `finish` is stop for any `reason`: the reason may be an abort even if the request
    ended by itself in the same step. Servers also stop at end tokens that the model's files name. If such a token is
    not in `stop`, `finish` is cut, and the turn continues after the token. But under a grammar `finish` is then stop,
    since the grammar allows no further token.
    """
    finish = "length" if len(tokens) >= sampling.max_new_tokens or reason == "length" else "cut"
    if tokens and (tokens[-1] in stop or (sampling.grammar is not None and reason == "stop")):
        finish = "stop"
    return Segment(np.array(tokens, np.int32), np.array(logprobs, np.float32), spans, finish)


def check_segment(segment: Segment, vocabulary: int) -> None:
    """Raises ServerFaultError: tokens, log-probs and spans differ in length, or a token cannot have been sampled."""
    count, logprobs, spans = len(segment.tokens), segment.logprobs, segment.spans
    bounds = [0, *(span.end for span in spans)]
    if len(logprobs) != count or [span.start for span in spans] != bounds[:-1] or bounds[-1] != count:
        raise ServerFaultError(f"{count} tokens have {len(logprobs)} log-probs and the versions {spans}")
    if not count:
        return
    # A comparison with nan is false, so nan is refused, too.
    if not (np.minimum.reduce(logprobs) > -np.inf and np.maximum.reduce(logprobs) <= MAX_LOGPROB):
        raise ServerFaultError("some log-probs are not finite, or above 0")
    if (largest := np.maximum.reduce(segment.tokens)) >= vocabulary:
        raise ServerFaultError(f"the server sampled token {largest}; the policy has ids up to {vocabulary - 1}")


def check_overrides(url: str, wanted: Mapping[str, Any], given: Mapping[str, Any], flag: str) -> None:
    """Raises ServerFaultError: the server at `url` was started with the entries `given` in its `flag`, and these lack
    entries of `wanted`.

    `wanted` is the run's override_config. Without all of its entries, the server's log-probs would differ from the
    learner's.
    """
    lacking = {name: value for name, value in wanted.items() if name not in given or given[name] != value}
    if lacking:
        raise ServerFaultError(
            f"{url} was started without these entries of model.override_config: {', '.join(lacking)}; start it with "
            f"{flag} '{json.dumps(dict(wanted))}'"
        )


class InferenceServer(Protocol):
    """One server. Every method raises ServerFaultError if the server fails."""

    url: str

    @property
    def precision(self) -> str:
        """The precision in which the server computes, a key of `weights.canary.TOLERANCES`; known after `join`."""

    @property
    def route(self) -> str:
        """The name of the route by which weights reach the server, for messages."""

    @property
    def spans(self) -> bool:
        """True if an answer shows which version sampled which token, even after an update during the request."""

    @property
    def loads_after_requests(self) -> bool:
        """True if `load` may be called while aborted requests end.

        Then the load begins once all requests are answered. Later requests wait until the load, or a part of it, is
        done, and their answers have the update's label.
        """

    async def join(self) -> None:
        """Examine the server, and end the requests, the pause or the half-done update that an earlier actor left."""

    async def check(self) -> None:
        """Raises ServerFaultError: the server does not answer, or does not have the weights that were loaded last."""

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
        """Continue `tokens` in a request named `rid`; `salt` separates the prefix caches of versions.

        With `routed_from` the answer should have the experts of all tokens from this index on, except the last token,
        which was not computed yet. `images` belong to placeholders in the tokens; only servers that take images get
        any.

        Raises EngineError: the request itself is faulty, so that every server would refuse it.
        """

    async def logprobs(
        self, tokens: Sequence[int], salt: str | None, start: int = 1, images: Sequence[PlacedImage] = ()
    ) -> NDArray[np.float32]:
        """The log-probs float32[T - start] of `tokens` from `start` on; `start` is at least 1.

        The log-probs are at temperature 1, without a grammar, and with the weights that were loaded last. `images` are
        as for `generate`, and their placeholders come before `start`. Raises EngineError also if the server refuses
        such a request.
        """

    async def abort(self, rid: str | None = None) -> None:
        """End the request `rid`; None: end all requests. The server answers each with its tokens so far."""

    async def pause(self, mode: str) -> None:
        """Stop between two decoding steps, in `mode` in_place or retract. Called only if `spans` is true.

        Some servers cannot tell, after an in_place pause, which version sampled a token. They always use retract.
        """

    def retracts(self, mode: str) -> bool:
        """True if a pause in `mode` drops the keys and values of sampled tokens."""

    async def resume(self) -> None: ...

    async def prepare(self, update: Update) -> None:
        """Prepare the update for `load`; requests continue meanwhile."""

    async def load(self, update: Update) -> None:
        """Load the whole update. The server is idle or paused, unless it `loads_after_requests`.

        After a fault the server's weights are unknown.
        """

    async def flush(self) -> None:
        """Empty the prefix cache. The server is idle, or paused with all requests retracted; it may be loading."""

    async def leave(self) -> None:
        """Remove what `join` and `load` set up on the server, such as process groups."""

    async def close(self) -> None:
        """Close all connections without waiting. Calls that are in progress fail."""


class FreeingServer(InferenceServer, Protocol):
    """A server that can share its GPUs with the learner."""

    async def free(self, memory: Sequence[str]) -> None:
        """Free the idle server's memory of these kinds (see `MEMORY`). Its contents are lost."""

    async def regain(self, memory: Sequence[str]) -> None:
        """Allocate the freed memory of these kinds again."""
