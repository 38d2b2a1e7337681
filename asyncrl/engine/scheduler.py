"""The scheduler of forward passes: it gives slots to sessions and plans the tokens of the next pass, without tensors.

Invariants:
- A session has at most one request at a time, and a slot at most one session.
- Requests get slots in the order of arrival. If no slot is free, the session that has been idle longest loses its slot.
- An idle session keeps its slot: its next request computes only the tokens after the longest common prefix.
- A sequence lacks the tokens whose keys and values its slot does not have. If it lacks `least_shared` tokens or more,
  it gets a copy of the longest prefix that another slot has computed, if this is longer than the sequence's own prefix.
  Shared prefixes are common: the members of a group share their prompt, and all tasks share the text of the tools.
- If the next pass computes, for an older request, at least half of the tokens that a sequence lacks, the sequence waits
  and then copies them.
- A sequence that decodes on the device (see engine/graphed/passes.py) gets no chunks until its request is done.
- A pass has every sequence that lacks one token, and at most `prefill_tokens` tokens of the remaining sequences, oldest
  request first. So a prompt of any length slows other sequences by a bounded amount.
- After `forget` no earlier key or value is used. With `keep`, the session that owns them still uses them, but no other
  session gets copies of them.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import Alternatives, Generation
from asyncrl.errors import EngineError
from asyncrl.modelling.routing import RoutedTokens


@dataclass(slots=True, eq=False)
class Request:
    """One call of `generate`: at most `limit` tokens after `prompt` int32[P], each with `wanted` alternatives.

    `future` gets the result or the error of the call.
    """

    session: str
    prompt: NDArray[np.int32]
    temperature: float
    limit: int
    stop: frozenset[int]
    key: int
    wanted: int = 0
    future: Future[Generation] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    alternatives: list[tuple[list[int], list[float]]] = field(default_factory=list)

    def finish(self, reason: str, experts: Sequence[NDArray[np.uint8]] = ()) -> None:
        """End the request. `experts` has the known experts, from the sequence's first token on."""
        if self.future.set_running_or_notify_cancel():
            tokens, versions = np.array(self.tokens, np.int32), np.array(self.versions, np.int32)
            routing = (RoutedTokens(0, np.stack(experts)),) if len(experts) else ()
            logprobs, others = np.array(self.logprobs, np.float32), self._alternatives()
            self.future.set_result(Generation(tokens, logprobs, versions, reason, routing=routing, alternatives=others))

    def _alternatives(self) -> Alternatives | None:
        if not self.alternatives:
            return None
        tokens, logprobs = zip(*self.alternatives, strict=True)
        return Alternatives(np.array(tokens, np.int32), np.array(logprobs, np.float32))

    def fail(self, error: EngineError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class Slot:
    """A session's row of the cache, which holds the first `cached` of its `tokens` (prompt and sampled).

    - `experts`, if the engine records them: a row uint8[W] for each token, with its experts when it was first computed.
      So a token that is computed again keeps the experts with which it was sampled.
    - `is_mixed`: true if the slot has keys and values of an older version, which other sessions must not copy
    - `is_decoding`: true if the device computes the next tokens by itself, so that `plan` gives the slot no chunks
    """

    index: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    experts: list[NDArray[np.uint8]] = field(default_factory=list)
    is_mixed: bool = False
    is_decoding: bool = False


class SlotChunk(NamedTuple):
    """Tokens that the next pass computes: [start, end) of the sequence in slot number `slot`."""

    slot: int
    start: int
    end: int


class Scheduler:
    """Plans passes over `slots` sequences, with at most `prefill_tokens` prompt tokens in each pass.

    `copy(source, slot, count)` must copy the keys and values of the first `count` tokens from slot to slot. A sequence
    that lacks fewer than `least_shared` tokens (at least 2) computes them: a search in other slots would take longer.
    """

    def __init__(
        self, slots: int, prefill_tokens: int, copy: Callable[[int, int, int], None], least_shared: int = 2
    ) -> None:
        self._prefill_tokens = prefill_tokens
        self._least_shared = least_shared
        self._copy = copy
        # A heap gives the lowest free slot: attention covers all slots up to the highest in use.
        self._free = list(range(slots))
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Slot] = {}
        self._idle: OrderedDict[str, Slot] = OrderedDict()

    @property
    def running(self) -> Collection[Slot]:
        """The slots with requests, in the order in which the requests got their slots."""
        return self._running.values()

    @property
    def busy(self) -> bool:
        """True if there is any request, running or waiting."""
        return bool(self._running or self._waiting)

    def is_running(self, session: str) -> bool:
        """True if a request of the session has a slot."""
        return session in self._running

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError: its session already has a request."""
        if self._request(request.session):
            raise EngineError(f"session {request.session!r} is generating already; await it or release it first")
        self._waiting[request.session] = request

    def plan(self) -> list[tuple[Slot, SlotChunk]]:
        """Plan the chunks of the next pass, with chunks of one token first. Before that, copy into slots the prefixes
        that other slots have computed."""
        self._admit()
        single: list[tuple[Slot, SlotChunk]] = []
        longer: list[tuple[Slot, SlotChunk]] = []
        budget = self._prefill_tokens
        for slot in self._running.values():
            if slot.is_decoding:
                continue
            if budget and len(slot.tokens) - slot.cached >= self._least_shared:
                self._share(slot)
                if any(not other.is_mixed and _shares_half(slot, other, chunk.end) for other, chunk in longer):
                    continue
            count = len(slot.tokens) - slot.cached
            if count > 1:
                count = min(count, budget)
                budget -= count
            if count:
                chunk = SlotChunk(slot.index, slot.cached, slot.cached + count)
                (single if count == 1 else longer).append((slot, chunk))
        return single + longer

    def append(
        self,
        slot: Slot,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        alternatives: Sequence[tuple[list[int], list[float]]] = (),
    ) -> None:
        """Add sampled tokens. The last one may end the request.

        `alternatives` has for each token the most likely tokens and their log-probs. The request keeps the first
        `wanted` of them.
        """
        request = slot.request
        slot.tokens += tokens
        request.tokens += tokens
        request.logprobs += logprobs
        request.versions += [version] * len(tokens)
        if request.wanted:
            wanted = request.wanted
            request.alternatives += [(likeliest[:wanted], theirs[:wanted]) for likeliest, theirs in alternatives]
        if tokens[-1] in request.stop:
            self._end(slot, "stop")
        elif len(request.tokens) == request.limit:
            self._end(slot, "length")

    def release(self, session: str) -> None:
        """Forget a session. A request of the session ends with its tokens so far."""
        if request := self._drop(session):
            request.finish("abort")

    def cancel(self, request: Request) -> None:
        """Release the request's session, unless the session has another request by now."""
        if self._request(request.session) is request:
            self.release(request.session)

    def fail(self, request: Request, error: EngineError) -> None:
        """Forget the request's session, and end the request with an error."""
        self._drop(request.session)
        request.fail(error)

    def fail_all(self, error: EngineError, waiting: bool = True) -> None:
        """Fail the running requests and, with `waiting`, the requests that wait for a slot."""
        requests = [slot.request for slot in self._running.values()]
        for request in [*requests, *(self._waiting.values() if waiting else ())]:
            self.fail(request, error)

    def forget(self, keep: bool = False) -> set[int]:
        """Mark the whole cache as computed by an older version. Returns the slots whose contents are still used.

        Running sequences are computed again, and idle sessions lose their slots. With `keep`, all sessions keep their
        slots, keys and values.
        """
        if keep:
            kept = [*self._running.values(), *self._idle.values()]
            for slot in kept:
                slot.is_mixed = slot.cached > 0
            return {slot.index for slot in kept}
        for slot in self._running.values():
            slot.cached, slot.is_decoding = 0, False
        while self._idle:
            self._evict()
        return set()

    def _request(self, session: str) -> Request | None:
        slot = self._running.get(session)
        return slot.request if slot else self._waiting.get(session)

    def _drop(self, session: str) -> Request | None:
        """Remove a session, which may both wait and have an idle slot. Return its request, or None."""
        request = self._request(session)
        self._waiting.pop(session, None)
        if slot := self._running.pop(session, None) or self._idle.pop(session, None):
            slot.is_decoding = False
            heapq.heappush(self._free, slot.index)
        return request

    def _admit(self) -> None:
        while self._waiting and (self._free or self._idle):
            session, request = self._waiting.popitem(last=False)
            self._running[session] = self._slot_for(session, request)

    def _slot_for(self, session: str, request: Request) -> Slot:
        slot = self._idle.pop(session, None)
        if slot is None:
            if not self._free:
                self._evict()
            slot = Slot(heapq.heappop(self._free), request)
        # At least one token must be computed, to get the distribution of the next token.
        prompt = request.prompt.tolist()
        shared = _common_prefix(slot.tokens, prompt, min(slot.cached, len(prompt) - 1))
        slot.request, slot.tokens, slot.cached = request, prompt, shared
        slot.is_mixed &= shared > 0
        del slot.experts[shared:]
        return slot

    def _share(self, slot: Slot) -> None:
        tokens, source, shared = slot.tokens, slot, slot.cached
        most = len(tokens) - 1
        # The next token is compared first: of hundreds of slots, only few have the same one.
        for other in chain(self._running.values(), self._idle.values()):
            if shared < most and other.cached > shared and other.tokens[shared] == tokens[shared]:
                common = 0 if other.is_mixed else _common_prefix(other.tokens, tokens, min(other.cached, most))
                if common > shared:
                    source, shared = other, common
        if source is not slot:
            self._copy(source.index, slot.index, shared)
            slot.experts += source.experts[len(slot.experts) : shared]
            slot.cached = shared
            slot.is_mixed = False

    def _evict(self) -> None:
        _, slot = self._idle.popitem(last=False)
        heapq.heappush(self._free, slot.index)

    def _end(self, slot: Slot, reason: str) -> None:
        session = slot.request.session
        self._idle[session] = self._running.pop(session)
        slot.is_decoding = False
        slot.request.finish(reason, slot.experts)


def _shares_half(slot: Slot, other: Slot, end: int) -> bool:
    """True if the first `end` tokens of `other` contain at least half of the tokens that `slot` lacks."""
    tokens, cached = slot.tokens, slot.cached
    limit = min(end, len(tokens) - 1)
    if limit <= cached or other.tokens[cached] != tokens[cached]:
        return False
    return 2 * (_common_prefix(other.tokens, tokens, limit) - cached) >= len(tokens) - cached


def _common_prefix(first: list[int], second: list[int], limit: int) -> int:
    """The number of equal tokens at the beginnings, at most `limit`."""
    if first[:limit] == second[:limit]:
        return limit
    same, other = 0, limit
    # Lists are compared faster as a whole than token by token.
    while other - same > 1:
        middle = (same + other) // 2
        if first[same:middle] == second[same:middle]:
            same = middle
        else:
            other = middle
    return same
