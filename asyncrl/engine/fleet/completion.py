"""Completes turns of the policy: sends requests to servers, one after another, until the turn has all its tokens.

A turn keeps its tokens and continues through updates, aborts and lost servers. Each request covers at most one segment
of a turn, so that only this segment is sampled again if the server dies. A turn under a grammar is one request: see
partial_turn.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from asyncrl.engine.base import PlacedImage
from asyncrl.engine.fleet.endpoint import Endpoint
from asyncrl.engine.fleet.grammar_mass import measure_grammar
from asyncrl.engine.fleet.partial_turn import PartialTurn, without_recomputed
from asyncrl.engine.fleet.prefixes import ComputedPrefixes
from asyncrl.engine.fleet.server import InferenceServer, Segment, ServerFaultError
from asyncrl.engine.fleet.settings import FleetSettings
from asyncrl.errors import EngineError
from asyncrl.network.throttle import Throttled
from asyncrl.observe.spans import Spans

logger = logging.getLogger(__name__)


class TurnCompletion:
    """Completes turns at the servers that `ready` gives for a session.

    - `leave` is called with a session whose server failed: its next request may go to another server.
    - `spans` records each segment.
    - With `routed`, turns have the experts of their tokens.
    """

    def __init__(
        self,
        ready: Callable[[str], Awaitable[Endpoint]],
        leave: Callable[[str], None],
        spans: Spans,
        settings: FleetSettings,
        routed: bool,
    ) -> None:
        self._ready = ready
        self._leave = leave
        self._counts: Counter[str] = Counter()
        self._spans = spans
        self._settings = settings
        self._routed: dict[str, int] | None = {} if routed else None
        self._refusals = Throttled(logger, "experts of tokens are refused")
        self._prefixes = ComputedPrefixes()
        self._salts: dict[str, str | None] = {}

    def routed_from(self, session: str, length: int) -> int | None:
        """The index of the first token whose experts are unknown, in a session that now has `length` tokens. 0 if the
        session has become shorter; None if experts are not recorded."""
        if self._routed is None:
            return None
        known = self._routed.get(session, 0)
        return known if known <= length else 0

    def keep(self, session: str, turn: PartialTurn) -> None:
        """Keep the number of tokens whose experts are known, for the next turn of the session."""
        if self._routed is not None and turn.routed_from is not None:
            self._routed[session] = turn.routed_from

    def forget(self, session: str) -> None:
        """Forget a session that has ended, and the prefix that a server has computed for this session."""
        if self._routed is not None:
            self._routed.pop(session, None)
        self._prefixes.forget(session)
        self._salts.pop(session, None)

    def lose(self, url: str) -> None:
        """Forget the prefixes of the server at `url`, which is lost."""
        self._prefixes.lose(url)

    @property
    def counters(self) -> dict[str, float]:
        names = (
            *("segments", "cut_segments", "lost_segments", "recomputed_tokens"),
            *("grammar_tokens", "grammar_tokens_unmeasured", "grammar_restarts"),
            *(("routed_tokens", "routed_bytes", "routed_refused") if self._routed is not None else ()),
        )
        return {name: self._counts[name] for name in names}

    async def complete(
        self, turn: PartialTurn, stop: Sequence[int], session: str, images: Sequence[PlacedImage]
    ) -> None:
        """Send requests until the turn is complete. Raises EngineError: `attempts` requests in a row failed."""
        failures = 0
        while True:
            endpoint = await self._ready(session)
            salt = self._salts.setdefault(session, endpoint.salt)
            self._counts["segments"] += 1
            tokens = turn.tokens
            try:
                about = {"episode": session.partition("/")[0], "server": endpoint.shown_url}
                with self._spans.span("segment", **about) as values:
                    segment = await endpoint.generate(tokens, turn.sampling, stop, salt, turn.routed_from, images)
                    values |= {"tokens": len(segment.tokens), "finish": segment.finish}
            except ServerFaultError as fault:
                self._counts["lost_segments"] += 1
                # A server may fail requests and still pass checks, so the next request may go to another server.
                self._leave(session)
                failures, reason = failures + 1, str(fault)
            else:
                server, settings = endpoint.server, self._settings
                self._counts["recomputed_tokens"] += self._prefixes.again(
                    session, server.url, len(tokens), segment, server.retracts(settings.mode), not settings.salted
                )
                if turn.add(self._count_routing(segment, len(tokens), server)):
                    if turn.has_grammar:
                        turn.grammar_mass = mass = await measure_grammar(turn, endpoint, images)
                        self._counts["grammar_tokens"] += len(mass)
                        self._counts["grammar_tokens_unmeasured"] += len(mass) - int(np.count_nonzero(mass))
                    return
                self._counts["cut_segments"] += segment.finish == "cut"
                self._counts["grammar_restarts"] += turn.has_grammar
                reason = f"{endpoint.server.url} aborted it without a token"
                if turn.has_grammar:
                    failures += 1
                    reason = f"{endpoint.server.url} interrupted it, after which a turn under a grammar starts over"
                else:
                    failures = 0 if len(segment.tokens) or not endpoint.ready else failures + 1
            if failures >= self._settings.attempts:
                raise EngineError(f"{failures} requests in a row failed, the last one because {reason}")

    def _count_routing(self, segment: Segment, prompt: int, server: InferenceServer) -> Segment:
        """Count the experts in a segment whose request continued `prompt` tokens. Drop the experts of tokens that were
        computed again after they had been sampled."""
        if segment.routing_fault:
            self._counts["routed_refused"] += 1
            self._refusals.say(f"{server.url}: {segment.routing_fault}")
        if server.retracts(self._settings.mode):
            segment = without_recomputed(segment, prompt)
        if segment.routing is not None:
            self._counts["routed_tokens"] += len(segment.routing.rows)
            self._counts["routed_bytes"] += segment.routing.rows.nbytes
        return segment
