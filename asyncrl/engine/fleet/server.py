"""The protocol of one inference server, for the fleet: SGLang, vLLM or another one.

A server belongs to one actor. Each version of the weights has a label, which differs between actor processes. This
detects a server that has the weights of another actor, or has read its folder's weights after a restart.
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
    """The answer to one request, as the server gave it: tokens int32[G] with logprobs float32[G].

    The spans should cover the tokens in order (see `check_segment`).

    `finish` is one of these:

    - stop: the last token is one of the request's stop ids, or under a grammar one of the server's
    - length: the request's limit, or the server's own
    - cut: the request was interrupted and can be continued

    `routing` has the requested experts of tokens of prompt and answer; None if none came. `routing_fault` is the reason
    why experts are refused. `alternatives` are there if the server gave some.
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
    """Make the segment of a request with `sampling`, which the server ended for `reason`.

    The last token counts more than the reason. Servers also stop at end tokens that the model's own files name. If such
    a token is not in `stop`, the segment is cut, and the turn continues after it; under a grammar the turn has ended,
    since nothing may follow. An abort may also arrive in the step in which a request ends anyway.
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


def check_overrides(url: str, wanted: Mapping[str, Any], given: Mapping[str, Any], flag: str) -> None:
    """Raises ServerFaultError: the server at `url` was not started with all of `wanted`, the run's override_config.

    It was started with `given` for its `flag`. Its log-probs would not be the learner's.
    """
    lacking = {name: value for name, value in wanted.items() if name not in given or given[name] != value}
    if lacking:
        raise ServerFaultError(
            f"{url} was started without model.override_config, at least {', '.join(lacking)}; start it with "
            f"{flag} '{json.dumps(dict(wanted))}'"
        )


class InferenceServer(Protocol):
    """One server. Every method raises ServerFaultError if the server fails."""

    url: str

    @property
    def precision(self) -> str:
        """The precision in which it computes, a key of `weights.canary.TOLERANCES`; known once it has joined."""

    @property
    def route(self) -> str:
        """The route of weights into it, for messages."""

    @property
    def spans(self) -> bool:
        """True if the answer to a request that went on through an update tells which version sampled which token."""

    @property
    def loads_after_requests(self) -> bool:
        """True if `load` may be called while requests end.

        Then the load begins once all are answered. Later requests wait for all of it or a part of it, and their answers
        have the update's label.
        """

    async def join(self) -> None:
        """Examine the server, and end the requests, the pause or half an update that an earlier actor left there."""

    async def check(self) -> None:
        """Raises ServerFaultError unless it answers and has the weights that it got last."""

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
        """Continue `tokens` under the name `rid`; `salt` separates the prefix caches of versions.

        With `routed_from` the answer should have the experts of all tokens from there on, except the last one, which
        was not computed yet. `images` are in the tokens; only servers that take images get any.

        Raises EngineError: the request itself is refused, so that no server would take it.
        """

    async def logprobs(
        self, tokens: Sequence[int], salt: str | None, start: int = 1, images: Sequence[PlacedImage] = ()
    ) -> NDArray[np.float32]:
        """The log-probs float32[T - start] of `tokens` from `start` on, which is 1 or more.

        They are at temperature 1, without a grammar, and with the weights that were loaded last. `images` are as for
        `generate`, and before `start`. Raises EngineError also if the server refuses such a request.
        """

    async def abort(self, rid: str | None = None) -> None:
        """End a request, or all of them. Each is answered with its tokens so far."""

    async def pause(self, mode: str) -> None:
        """Stop between two decoding steps, in `mode` in_place or retract. Called only if `spans` is true.

        It is retract in any case if after an in_place pause the server could not tell which version sampled a token.
        """

    def retracts(self, mode: str) -> bool:
        """True if a pause in `mode` drops the keys and values of the tokens that requests have sampled."""

    async def resume(self) -> None: ...

    async def prepare(self, update: Update) -> None:
        """Prepare the update for `load`; requests continue meanwhile."""

    async def load(self, update: Update) -> None:
        """Load the whole update. The server is idle or paused, unless it `loads_after_requests`.

        After a fault its weights are unknown.
        """

    async def flush(self) -> None:
        """Forget the prefix cache. The server is idle, or paused with all requests retracted; it may be loading."""

    async def leave(self) -> None:
        """End the process groups and the like that joining and loading set up on the server."""

    async def close(self) -> None:
        """Close all connections without waiting. Calls that are in progress fail."""


class FreeingServer(InferenceServer, Protocol):
    """A server that can share its GPUs with the learner."""

    async def free(self, memory: Sequence[str]) -> None:
        """Free the memory of these kinds of `MEMORY`; its contents are lost. The server is idle, and has all of it."""

    async def regain(self, memory: Sequence[str]) -> None:
        """Allocate memory of these kinds again, which was freed."""
