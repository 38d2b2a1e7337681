"""One turn as the segments that its requests gave: each continues the ones before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.actor.engine.base import Generation
from asyncrl.actor.engine.fleet.server import Segment
from asyncrl.types import Sampling


class PartialTurn:
    """A turn that continues `prompt`. One request asks for `segment_tokens` at most; 0 asks for the whole turn."""

    def __init__(self, prompt: NDArray[np.int32], sampling: Sampling, segment_tokens: int = 0) -> None:
        self._prompt = prompt
        self._sampling = sampling
        self._segment_tokens = segment_tokens
        self._segments: list[Segment] = []
        self._count = 0

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens that the next request continues."""
        return np.concatenate([self._prompt, *(segment.tokens for segment in self._segments)])

    @property
    def sampling(self) -> Sampling:
        """How the next request is sampled: with the tokens that are left, or those of one segment."""
        limit = self._limit
        whole = limit == self._sampling.max_new_tokens
        return self._sampling if whole else replace(self._sampling, max_new_tokens=limit)

    @property
    def _limit(self) -> int:
        left = self._sampling.max_new_tokens - self._count
        return min(left, self._segment_tokens or left)

    def add(self, segment: Segment) -> bool:
        """Add the answer to the next request. Whether the turn is over."""
        whole = len(segment.tokens) >= self._limit
        self._segments.append(segment)
        self._count += len(segment.tokens)
        if segment.finish != "length":
            return segment.finish == "stop"
        # Fewer tokens than the request's limit are the server's own limit, behind which nothing goes on.
        return not whole or self._count >= self._sampling.max_new_tokens

    def generation(self, finish: str = "") -> Generation:
        """The tokens so far; the last segment says how they end, unless `finish` does."""
        if not self._segments:
            return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), finish)
        return Generation(
            np.concatenate([segment.tokens for segment in self._segments]),
            np.concatenate([segment.logprobs for segment in self._segments]),
            np.concatenate([_versions(segment) for segment in self._segments]),
            finish or self._segments[-1].finish,
        )


def _versions(segment: Segment) -> NDArray[np.int32]:
    """From labels VERSION-OWNER."""
    versions = np.empty(len(segment.tokens), np.int32)
    for span in segment.spans:
        versions[span.start : span.end] = int(span.label.partition("-")[0])
    return versions
