"""What one turn has so far: a turn survives any number of aborts and lost servers, each of which ends a segment."""

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
    """A turn that continues `prompt`; its tokens, log-probs and versions are those of its segments in order."""

    def __init__(self, prompt: NDArray[np.int32], sampling: Sampling) -> None:
        self._prompt = prompt
        self._sampling = sampling
        self._segments: list[Segment] = []
        self._count = 0

    @property
    def tokens(self) -> NDArray[np.int32]:
        """What the next request continues."""
        return np.concatenate([self._prompt, *(segment.tokens for segment in self._segments)])

    @property
    def sampling(self) -> Sampling:
        """How the next request is sampled: with the tokens that are left."""
        return replace(self._sampling, max_new_tokens=self._sampling.max_new_tokens - self._count)

    def add(self, segment: Segment) -> bool:
        """Whether the turn is over."""
        self._segments.append(segment)
        self._count += len(segment.tokens)
        return segment.finish != "cut"

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
