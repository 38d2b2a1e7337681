"""The sampled tokens that requests do not have yet: kept in arrays, and handed out when a sequence needs them.

Hundreds of sequences decode at once, and each pass samples a token for each of them. If the host ran Python code for
each token, it would need as long for a pass as the device does. So the tokens of a pass are written into arrays, and
Python code runs only for sequences that end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.passes import SampledTokens
from asyncrl.engine.scheduler import Slot

ROOM = 256
"""The maximum number of tokens of a sequence that are kept."""

_NO_TOKEN = -1


class UnreadTokens:
    """The tokens of the sequences in `slots` slots that were sampled since their last hand-over."""

    def __init__(self, slots: int) -> None:
        self._tokens = np.zeros((slots, ROOM), np.int32)
        self._logprobs = np.zeros((slots, ROOM))
        self._counts = np.zeros(slots, np.int64)
        # How many further tokens a sequence may have, before it is due.
        self._left = np.zeros(slots, np.int64)
        self._stops = np.full((slots, 1), _NO_TOKEN)

    def begin(self, slot: Slot) -> None:
        """Forget the tokens of the sequence that was in the slot before."""
        index, request = slot.index, slot.request
        stops = sorted(request.stop)
        if (more := len(stops) - self._stops.shape[1]) > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, more)), constant_values=_NO_TOKEN)
        self._stops[index] = _NO_TOKEN
        self._stops[index, : len(stops)] = stops
        self._counts[index] = 0
        self._left[index] = request.limit - len(request.tokens)

    def add(self, indices: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: NDArray[np.float64]) -> list[int]:
        """Add a token of each of the slots `indices`, with its log-prob. Returns the places in `indices` of the
        sequences that are due: their requests end with this token, or there is no room for another one."""
        places = self._counts[indices]
        self._tokens[indices, places] = tokens
        self._logprobs[indices, places] = logprobs
        self._counts[indices] = places + 1
        self._left[indices] -= 1
        stopped = (tokens[:, None] == self._stops[indices]).any(1)
        due = stopped | (self._left[indices] == 0) | (places + 1 == ROOM) | ~np.isfinite(logprobs)
        return due.nonzero()[0].tolist()  # type: ignore[no-any-return]

    def hand_out(self, slot: Slot, alternatives: Sequence[tuple[list[int], list[float]]] = ()) -> SampledTokens | None:
        """The tokens that the slot's request does not have yet; None if it has all. The slot then counts all of its
        tokens except the last as cached."""
        index = slot.index
        count = int(self._counts[index])
        if not count:
            return None
        self._counts[index] = 0
        slot.cached = len(slot.tokens) + count - 1
        tokens, logprobs = self._tokens[index, :count].tolist(), self._logprobs[index, :count].tolist()
        return SampledTokens(slot, tokens, logprobs, alternatives)
