"""A sharded model's parameters, whole, one bucket after the other on rank 0.

What holds: no rank's device has more than two buckets of gathered parameters at any time. The next bucket is gathered
while the caller is busy with the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from asyncrl.learner.ranks import Ranks
from asyncrl.weights.buckets import Bucket, Entry, Filled, plan_buckets
from asyncrl.weights.manifest import DTYPES, dtype_name, new_bytes

BUCKET_BYTES = 256 << 20


def plan_gather(parameters: Mapping[str, Tensor], dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """The buckets in which the whole parameters will travel in `dtype`."""
    entries = [Entry(name, dtype_name(dtype), tuple(each.shape)) for name, each in parameters.items()]
    return plan_buckets(entries, bucket_bytes)


def gather(parameters: Mapping[str, Tensor], buckets: Sequence[Bucket], ranks: Ranks) -> Iterator[Filled]:
    """The whole parameters in the buckets of a plan, each of one dtype, on the device of rank 0; nothing elsewhere.

    Every rank must iterate to the end. On a GPU a bucket's buffer is used again once the next one is asked for.
    """
    again = ranks.rank == 0 and ranks.device.type != "cpu"
    largest = max((bucket.nbytes for bucket in buckets), default=0) if again else 0
    shared = torch.empty(largest, dtype=torch.uint8, device=ranks.device)
    last: Filled | None = None
    for bucket in buckets:
        under_way = _Gathering(bucket, parameters, ranks)
        if last is not None:
            yield last
        last = under_way.finish(shared)
    if last is not None:
        yield last


class _Gathering:
    """One bucket on its way since it was made, and in place with `finish`."""

    def __init__(self, bucket: Bucket, parameters: Mapping[str, Tensor], ranks: Ranks) -> None:
        dtype = DTYPES[bucket.entries[0].dtype]
        self._bucket = bucket
        self._ranks = ranks
        self._pieces = [_Piece.of(parameters[entry.name], dtype, ranks) for entry in bucket.entries]
        self._received: list[Tensor] = []
        self._work = self._begin(dtype) if ranks.size > 1 else None

    def _begin(self, dtype: torch.dtype) -> dist.Work | None:
        # Rank 0 has the largest part of every parameter.
        size = sum(piece.size(0, self._ranks.size) for piece in self._pieces)
        sent = torch.empty(size, dtype=dtype, device=self._ranks.device)
        start = 0
        for piece in self._pieces:
            sent[start : start + piece.local.numel()] = piece.local
            start += piece.local.numel()
        if self._ranks.rank == 0:
            self._received = [torch.empty_like(sent) for _ in range(self._ranks.size)]
        work: dist.Work | None = dist.gather(
            sent, self._received or None, group=self._ranks.mesh.get_group(), async_op=True
        )
        return work

    def finish(self, shared: Tensor) -> Filled | None:
        """The bucket on rank 0, at the start of `shared` on a GPU; None elsewhere."""
        if self._work is not None:
            self._work.wait()
        if self._ranks.rank != 0:
            return None
        nbytes = self._bucket.nbytes
        filled = Filled(self._bucket, shared[:nbytes] if shared.is_cuda else new_bytes(nbytes))
        for piece, whole in zip(self._pieces, self._bucket.views(filled.flat).values(), strict=True):
            torch.cat(self._parts(piece), out=whole.view(-1))
        # The next bucket's buffers come before this object goes.
        self._received, self._pieces, self._work = [], [], None
        return filled

    def _parts(self, piece: _Piece) -> list[Tensor]:
        """What the ranks have of the next parameter."""
        if not self._received:
            return [piece.local]
        parts = []
        for rank, rest in enumerate(self._received):
            size = piece.size(rank, self._ranks.size)
            parts.append(rest[:size])
            self._received[rank] = rest[size:]
        return parts if piece.sharded else parts[:1]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """This rank's part of one parameter, flat: rows of it where it is sharded, else all of it."""

    local: Tensor
    shape: tuple[int, ...]
    sharded: bool

    @staticmethod
    def of(parameter: Tensor, dtype: torch.dtype, ranks: Ranks) -> _Piece:
        shape, own = tuple(parameter.shape), parameter.detach()
        if not isinstance(own, DTensor):
            return _Piece(own.to(dtype).reshape(-1), shape, False)
        if own.placements == (Shard(0),) and own.device_mesh.size() == ranks.size:
            return _Piece(own.to_local().to(dtype).reshape(-1), shape, True)
        return _Piece(own.full_tensor().to(dtype).reshape(-1), shape, False)

    def size(self, rank: int, ranks: int) -> int:
        """Elements that `rank` has of it."""
        if not self.sharded:
            return math.prod(self.shape)
        rows, rest = self.shape[0], math.prod(self.shape[1:])
        share = -(-rows // ranks)
        return max(0, min(share, rows - rank * share)) * rest
