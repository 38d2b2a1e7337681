"""The sequences that decode on the device, as arrays with a row for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.scheduler import Request, Slot


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """Sequences, in the order in which they began to decode. A pass that samples a token of each has started.

    - `indices` int64: the numbers of the `slots`
    - `lengths` int64: the number of computed tokens at the end of this pass
    - `left` int64: the number of tokens that may be sampled after this pass
    - `keys` uint64 and `temperatures` float64: those of the `requests`
    """

    slots: Sequence[Slot]
    requests: Sequence[Request]
    indices: NDArray[np.int64]
    lengths: NDArray[np.int64]
    left: NDArray[np.int64]
    keys: NDArray[np.uint64]
    temperatures: NDArray[np.float64]

    @classmethod
    def after(cls, slots: Sequence[Slot]) -> Decoding:
        """The sequences in `slots`. A pass has started that samples the token after all tokens of each slot."""
        requests = [slot.request for slot in slots]
        return cls(
            slots,
            requests,
            np.array([slot.index for slot in slots], np.int64),
            np.array([len(slot.tokens) for slot in slots], np.int64),
            np.array([request.limit - len(request.tokens) - 1 for request in requests], np.int64),
            np.array([request.key for request in requests], np.uint64),
            np.array([request.temperature for request in requests], np.float64),
        )

    def __len__(self) -> int:
        return len(self.slots)

    def __add__(self, others: Decoding) -> Decoding:
        arrays = zip(self._arrays, others._arrays, strict=True)
        joined: list[Any] = [np.concatenate(pair) for pair in arrays]
        return Decoding([*self.slots, *others.slots], [*self.requests, *others.requests], *joined)

    @property
    def present(self) -> NDArray[np.bool_]:
        """True for each sequence whose request has not ended."""
        pairs = zip(self.slots, self.requests, strict=True)
        return np.array([slot.is_decoding and slot.request is request for slot, request in pairs], np.bool_)

    def going_on(self) -> Decoding:
        """The sequences of which another token may be sampled, after the pass that has started."""
        kept = self.present & (self.left > 0)
        if kept.all():
            return self
        arrays: list[Any] = [each[kept] for each in self._arrays]
        return Decoding(list(compress(self.slots, kept)), list(compress(self.requests, kept)), *arrays)

    def one_further(self) -> Decoding:
        """The same sequences after one more token of each."""
        lengths, left = self.lengths + 1, self.left - 1
        return Decoding(self.slots, self.requests, self.indices, lengths, left, self.keys, self.temperatures)

    @property
    def _arrays(self) -> tuple[NDArray[Any], ...]:
        return self.indices, self.lengths, self.left, self.keys, self.temperatures
