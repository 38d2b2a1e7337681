"""What one turn has so far, segment by segment: each is one request, and what a request gave is not lost any more.

A segment ends with the turn, with an abort, or with the tokens that one request may ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.base import Generation
from asyncrl.actor.engine.fleet.member import version_of
from asyncrl.actor.engine.fleet.server import Segment
from asyncrl.types import Sampling


class Draft:
    """A turn that continues `prompt`; its tokens, log-probs and versions are those of its segments in order.

    `segment_tokens` bounds what one request asks for; 0 asks for the whole turn.
    """

    def __init__(self, prompt: NDArray[np.int32], sampling: Sampling, segment_tokens: int = 0) -> None:
        self._prompt = prompt
        self._sampling = sampling
        self._segment_tokens = segment_tokens
        self._segments: list[Segment] = []
        self._count = 0

    @property
    def tokens(self) -> NDArray[np.int32]:
        """What the next request continues."""
        return np.concatenate([self._prompt, *(segment.tokens for segment in self._segments)])

    @property
    def sampling(self) -> Sampling:
        """How the next request is sampled: with the tokens that are left, or those of one segment."""
        left = self._sampling.max_new_tokens - self._count
        return replace(self._sampling, max_new_tokens=min(left, self._segment_tokens or left))

    def add(self, segment: Segment) -> bool:
        """Add what the next request gave. Whether the turn is over."""
        whole = len(segment.tokens) >= self.sampling.max_new_tokens
        self._segments.append(segment)
        self._count += len(segment.tokens)
        # A length that is less than was asked for is the server's own limit, behind which nothing goes on.
        at_segment_end = segment.finish == "length" and whole and self._count < self._sampling.max_new_tokens
        return segment.finish != "cut" and not at_segment_end

    def generation(self, finish: str = "") -> Generation:
        """The turn, ended by its last segment or for the reason given."""
        none = Segment(np.zeros(0, np.int32), np.zeros(0, np.float32), (), "cut")
        segments: Sequence[Segment] = self._segments or [none]
        versions = [_versions(segment) for segment in segments]
        return Generation(
            np.concatenate([segment.tokens for segment in segments]),
            np.concatenate([segment.logprobs for segment in segments]),
            np.concatenate(versions),
            finish or segments[-1].finish,
        )


def _versions(segment: Segment) -> NDArray[np.int32]:
    versions = np.empty(len(segment.tokens), np.int32)
    for span in segment.spans:
        versions[span.start : span.end] = version_of(span.label)
    return versions
