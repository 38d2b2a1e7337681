"""Selects the policy tokens of a packed batch, and has the operations on them that several formulas need.

Every formula runs on the M policy tokens. `PolicyTokens.scatter` writes results back to the N tokens, with 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.errors import InvariantError


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """R consecutive segments that together cover M tokens. lengths int64[R] may contain 0."""

    lengths: Tensor
    size: int

    def sum(self, values: Tensor) -> Tensor:
        """float64[R]: the sum of each segment; differentiable. A value that is not finite affects only its own
        segment."""
        return torch.segment_reduce(values.double(), "sum", lengths=self.lengths, unsafe=True)

    def mean(self, values: Tensor) -> Tensor:
        """float64[R]: the mean of each segment, 0 for an empty one; differentiable."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """float64[R]: the maximum of each segment, -inf for an empty one."""
        return torch.segment_reduce(values.double(), "max", lengths=self.lengths, unsafe=True)

    def spread(self, values: Tensor) -> Tensor:
        """[R] to [M]: each segment's value on all of its tokens; differentiable."""
        if _is_plain(values):
            return torch.from_numpy(values.numpy().repeat(self.lengths.numpy()))
        return values.repeat_interleave(self.lengths, output_size=self.size)

    @property
    def last(self) -> Tensor:
        """int64: the index in [M] of the last token of every non-empty segment."""
        return self.lengths.cumsum(0)[self.lengths > 0] - 1


class PackedTokens(Protocol):
    """The fields of `batch.Tokens` that `PolicyTokens.of` reads."""

    @property
    def mask(self) -> Tensor: ...

    @property
    def sequence(self) -> Tensor: ...

    @property
    def view(self) -> PolicyTokens | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTokens:
    """M selected tokens of N packed tokens, in order.

    - `index` int64[M]: the positions of the M tokens among the N tokens
    - `sequences`: the segments of the M tokens by sequence
    - `owner` int64[R]: the indices of the sequences in the global batch
    - `starts` int64[R]: the position among the N tokens at which each sequence begins
    - `packed`: N
    - `whole`: the selection from which `narrow` chose these tokens; None: this one is whole
    """

    index: Tensor
    sequences: Segments
    owner: Tensor
    starts: Tensor
    packed: int
    whole: PolicyTokens | None = None

    @classmethod
    def of(cls, tokens: PackedTokens) -> PolicyTokens:
        """The policy tokens. Raises InvariantError: the tokens of a sequence are not contiguous."""
        return cls.chosen(tokens.mask, tokens.sequence) if tokens.view is None else tokens.view

    @classmethod
    def chosen(cls, mask: Tensor, sequence: Tensor) -> PolicyTokens:
        """Selects the tokens on which `mask` bool[N] is true. sequence int64[N] is the same as in `Tokens`. Raises
        InvariantError like `of`."""
        index, count = _true_places(mask), sequence.numel()
        breaks = _true_places(sequence[1:] != sequence[:-1]) + 1
        edge = breaks.new_tensor([0]) if count else breaks.new_empty(0)
        starts = torch.cat([edge, breaks])
        owner = sequence[starts]
        if owner.unique().numel() != owner.numel():
            raise InvariantError("sequence: the tokens of one sequence must lie together; some are apart")
        first = torch.searchsorted(index, torch.cat([starts, breaks.new_tensor([count])]))
        return cls(index, Segments(first.diff(), index.numel()), owner, starts, count)

    def moved(self, move: Callable[[Tensor], Tensor]) -> PolicyTokens:
        """A copy with all tensors moved to another device."""
        lengths = replace(self.sequences, lengths=move(self.sequences.lengths))
        whole = None if self.whole is None else self.whole.moved(move)
        return PolicyTokens(move(self.index), lengths, move(self.owner), move(self.starts), self.packed, whole)

    def narrow(self, keep: Tensor) -> PolicyTokens:
        """Selects only the tokens on which `keep` bool[M] is true. All sequences and turns stay, though some may
        become empty."""
        kept = self.sequences.sum(keep).long()
        index = self.index[keep]
        whole = self if self.whole is None else self.whole
        return PolicyTokens(index, Segments(kept, index.numel()), self.owner, self.starts, self.packed, whole)

    def take(self, values: Tensor) -> Tensor:
        """[N] to [M]: the values of the selected tokens. Half precision becomes float32. Differentiable: all other
        tokens get a gradient of exactly 0."""
        taken = values.index_select(0, self.index)
        return taken.float() if taken.dtype in (torch.bfloat16, torch.float16) else taken

    def scatter(self, values: Tensor) -> Tensor:
        """[M] to [N], 0 on all other tokens."""
        return values.new_zeros(self.packed).scatter_(0, self.index, values)

    def by_sequence(self, values: Tensor) -> Tensor:
        """[S] to [M]: each sequence's value on all of its tokens."""
        return self.sequences.spread(values[self.owner])

    def turns(self) -> Segments:
        """The segments by assistant turn. A turn is an unbroken run of policy tokens. A token that `narrow` left out
        does not end a turn."""
        whole = self if self.whole is None else self.whole
        starts = torch.ones(whole.index.numel(), dtype=torch.bool, device=whole.index.device)
        starts[1:] = whole.index.diff() != 1
        starts[whole.sequences.last[:-1] + 1] = True
        edges = torch.cat([whole.index[starts], whole.index.new_tensor([self.packed])])
        return Segments(torch.searchsorted(self.index, edges).diff(), self.index.numel())

    def shift(self, values: Tensor) -> Tensor:
        """[M]: for each token the value of the sequence's next policy token, 0 for the last one."""
        shifted = torch.empty_like(values)
        shifted[:-1] = values[1:]
        shifted[self.sequences.last] = 0
        return shifted

    def decay(self, rate: float, like: Tensor) -> Tensor:
        """[M]: `rate` for each token, but 0 for each sequence's last token, so that a recursion ends with the
        sequence."""
        return torch.full_like(like, rate).index_fill_(0, self.sequences.last, 0.0)


def _is_plain(values: Tensor) -> bool:
    """True if NumPy can read the tensor."""
    # On the CPU, NumPy is several times faster than torch at these loops over memory.
    return values.device.type == "cpu" and not values.requires_grad and values.dtype != torch.bfloat16


def _true_places(mask: Tensor) -> Tensor:
    """int64: the indices of the true entries of mask bool[N], ascending."""
    return torch.from_numpy(mask.numpy().nonzero()[0]) if _is_plain(mask) else mask.nonzero().squeeze(1)
