"""A turn composed of the answers to several requests, since servers may interrupt or lose a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.base import Alternatives, Generation
from asyncrl.engine.fleet.server import Segment
from asyncrl.modelling.routing import RoutedTokens
from asyncrl.types import Sampling

_NO_TOKENS = Segment(np.zeros(0, np.int32), np.zeros(0, np.float32), (), "cut")


class PartialTurn:
    """A turn that continues `prompt`. It has the segments that answered the requests so far.

    - One request samples at most `segment_tokens`; 0: the whole turn.
    - A turn under a grammar is one request, and starts over when it is interrupted: a server that continued it would
      begin the grammar again. `grammar_mass` is passed on to its Generation.
    - `routed_from` is the index of the first token whose experts have not arrived yet; None if experts are not wanted.
    - A turn that has sampled one of `marks`, the placeholders of images, ends with its request: servers refuse a prompt
      with images that has further placeholders.
    """

    def __init__(
        self,
        prompt: NDArray[np.int32],
        sampling: Sampling,
        segment_tokens: int = 0,
        routed_from: int | None = None,
        marks: Sequence[int] = (),
    ) -> None:
        self._prompt = prompt
        self._sampling = sampling
        self._segment_tokens = 0 if self.has_grammar else segment_tokens
        self.grammar_mass: NDArray[np.float32] | None = None
        self.routed_from = routed_from
        self._marks = marks
        self._routing: list[RoutedTokens] = []
        self._segments: list[Segment] = []
        self._left = sampling.max_new_tokens

    @property
    def has_grammar(self) -> bool:
        return self._sampling.grammar is not None

    @property
    def temperature(self) -> float:
        return self._sampling.temperature

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens that the next request continues."""
        return _joined([self._prompt, *(segment.tokens for segment in self._segments)])

    @property
    def sampling(self) -> Sampling:
        """The sampling of the next request. It is limited to the tokens that the turn may still sample, or to one
        segment if that is shorter."""
        whole = self._limit == self._sampling.max_new_tokens
        return self._sampling if whole else replace(self._sampling, max_new_tokens=self._limit)

    @property
    def _limit(self) -> int:
        return min(self._left, self._segment_tokens or self._left)

    def add(self, segment: Segment) -> bool:
        """Add `segment`, the answer to the latest request. Returns true if the turn is over."""
        if self.has_grammar and segment.finish == "cut":
            return False
        if segment.routing is not None:
            self._routing.append(segment.routing)
            self.routed_from = segment.routing.end
        # If the finish is `length`, but with fewer tokens than the request's limit, the server's own limit was reached.
        # This ends the turn.
        own_limit = len(segment.tokens) < self._limit
        is_marked = bool(self._marks) and bool(np.isin(segment.tokens, self._marks).any())
        if is_marked and segment.finish == "cut":
            segment = replace(segment, finish="length")
        self._segments.append(segment)
        self._left -= len(segment.tokens)
        return segment.finish == "stop" or (segment.finish == "length" and (own_limit or is_marked or self._left <= 0))

    def generation(self, finish: str = "") -> Generation:
        """Return the tokens so far. The finish reason is `finish`, or the last segment's if `finish` is empty."""
        segments = self._segments or [_NO_TOKENS]
        return Generation(
            _joined([segment.tokens for segment in segments]),
            _joined([segment.logprobs for segment in segments]),
            _joined([_versions(segment) for segment in segments]),
            finish or segments[-1].finish,
            self.grammar_mass,
            tuple(self._routing),
            _joined_alternatives([segment for segment in segments if len(segment.tokens)]),
        )


def without_recomputed(segment: Segment, prompt: int) -> Segment:
    """Drop the experts of tokens that were computed again after a push of new weights. The request continued `prompt`
    tokens.

    At a push the server drops the keys and values of its requests. Then it computes again, with newer weights, the
    tokens that were sampled before the push. It reports the experts of this second computation, and not the experts
    with which the tokens were sampled.
    """
    routing = segment.routing
    if routing is None or len(segment.spans) < 2:
        return segment
    rows = routing.rows.copy()
    first, end = (max(0, prompt + token - routing.start) for token in (0, segment.spans[-1].start))
    rows[first:end] = 255
    return replace(segment, routing=RoutedTokens(routing.start, rows))


def _versions(segment: Segment) -> NDArray[np.int32]:
    """The versions of a segment's tokens, read from its labels, which have the form VERSION-OWNER."""
    versions = np.empty(len(segment.tokens), np.int32)
    for span in segment.spans:
        versions[span.start : span.end] = int(span.label.partition("-")[0])
    return versions


def _joined_alternatives(segments: list[Segment]) -> Alternatives | None:
    found = [segment.alternatives for segment in segments if segment.alternatives is not None]
    if not found or len(found) < len(segments):
        return None
    return Alternatives(_joined([each.tokens for each in found]), _joined([each.logprobs for each in found]))


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
