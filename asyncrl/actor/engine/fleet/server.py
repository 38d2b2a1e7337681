"""The protocol of one inference server: what the fleet needs of SGLang, vLLM or another one.

A server belongs to one actor. Its weights have a label, which is new for every version and every actor's life, so that
weights of somebody else, or those that a restarted server read from its folder, are never taken for ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.fleet.update import Update
from asyncrl.errors import EngineError
from asyncrl.types import Sampling


class ServerFaultError(EngineError):
    """The server did not do its part: another may. Its requests go elsewhere, and it gets none until it is mended."""


@dataclass(frozen=True, slots=True)
class Span:
    """The sampled tokens [start, end) of one request, and the label of the weights that sampled them."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """What one request gave: tokens int32[G], logprobs float32[G], spans that cover them in order.

    `finish` is stop (the last token is one of the request's stop ids), length (as many as asked), or cut: what there is
    of a request that can go on.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: Sequence[Span]
    finish: str


def read_spans(told: Sequence[Mapping[str, Any]], count: int) -> tuple[Span, ...]:
    """The spans that a server tells of `count` tokens. Raises KeyError, TypeError or ValueError: they are not such."""
    spans = tuple(Span(str(each["version"]), each["start"], each["end"]) for each in told)
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != count:
        raise ValueError(f"the versions {spans} do not cover {count} tokens")
    return spans


def finish_of(tokens: NDArray[np.int32], limit: int, stop: Sequence[int], reason: str) -> str:
    """How a segment ended that was to have `limit` tokens, by its tokens more than by the server's word.

    Servers also stop at the end marks that the model's own files name: where such a token is none of `stop`, the
    request is merely cut, and goes on behind it. An abort may meet a request in the step in which it ended.
    """
    if len(tokens) and int(tokens[-1]) in stop:
        return "stop"
    return "length" if len(tokens) >= limit or reason == "length" else "cut"


class Server(Protocol):
    """One server. Every method raises ServerFaultError where the server fails."""

    url: str

    @property
    def spans(self) -> bool:
        """Whether a request that lives on through an update tells which version sampled which token."""
        ...

    async def join(self) -> None:
        """Learn what the server is, and end what an earlier actor left there: requests, a pause, half an update."""
        ...

    async def check(self) -> None:
        """Raises ServerFaultError unless it lives and has the weights that it was given last."""
        ...

    async def generate(
        self, rid: str, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], salt: str | None
    ) -> Segment:
        """Continue `tokens` under the name `rid`; `salt` keeps the prefix cache of one version from another's.

        Raises EngineError: the request itself is refused, so that no server would take it.
        """
        ...

    async def abort(self, rid: str | None = None) -> None:
        """End a request, or all of them: each answers with what it has."""
        ...

    async def pause(self, mode: str) -> None:
        """Stop between two decoding steps; `mode` is in_place or retract. Needed only where there are `spans`."""
        ...

    async def resume(self) -> None: ...

    async def load(self, update: Update) -> None:
        """Take the whole update. The server is idle or paused; after a fault its weights are unknown."""
        ...

    async def flush(self) -> None:
        """Forget the prefix cache. The server is idle, or paused with all requests retracted."""
        ...

    async def close(self) -> None: ...
