"""A sharded model's weights as they are published, whole, one bucket after the other on rank 0.

What holds: no rank's device has more than two buckets of gathered weights at any time; rank 0 has beside them one part
that is being converted (see weight_format.py), such as the stacked experts of a layer, two or three times. The next
bucket is gathered while the caller is busy with the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from asyncrl.learner.ranks import Ranks, shard_of
from asyncrl.modelling.weight_format import ConvertedTensors, WeightFormat
from asyncrl.weights.buckets import Bucket, Entry, Filled
from asyncrl.weights.manifest import DTYPES, dtype_name, new_bytes

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Portion:
    """What is gathered at once: tensors of one dtype, in whole parts, which become those of the published `bucket`."""

    parts: tuple[ConvertedTensors, ...]
    bucket: Bucket

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.bucket.entries[0].dtype]


def plan_gather(published: WeightFormat, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> list[Portion]:
    """The portions in which the weights will travel: parameters in `dtype`, buffers in their own."""
    portions: list[Portion] = []
    room = 0
    for part in published.parts:
        own = published.buffer_dtypes.get(next(iter(part.model)), dtype)
        entries = tuple(Entry(name, dtype_name(own), shape) for name, shape in part.published.items())
        size = Bucket(entries).nbytes
        if portions and size <= room and portions[-1].dtype == own:
            last = portions.pop()
            portions.append(Portion((*last.parts, part), Bucket((*last.bucket.entries, *entries))))
        else:
            portions.append(Portion((part,), Bucket(entries)))
            room = bucket_bytes
        room -= size
    return portions


def gather(
    tensors: Mapping[str, Tensor], portions: Sequence[Portion], published: WeightFormat, ranks: Ranks
) -> Iterator[Filled]:
    """The published tensors in the buckets of a plan, on the device of rank 0, from the model's own; nothing elsewhere.

    Every rank must iterate to the end. On a GPU a bucket's buffer is used again once the next one is asked for.
    """
    again = ranks.rank == 0 and ranks.device.type != "cpu"
    largest = max((portion.bucket.nbytes for portion in portions), default=0) if again else 0
    shared = torch.empty(largest, dtype=torch.uint8, device=ranks.device)
    last: Filled | None = None
    for portion in portions:
        under_way = _Gathering(portion, tensors, published, ranks)
        if last is not None:
            yield last
        last = under_way.finish(shared)
    if last is not None:
        yield last


class _Gathering:
    """One portion on its way since it was made, and in place with `finish`."""

    def __init__(self, portion: Portion, tensors: Mapping[str, Tensor], published: WeightFormat, ranks: Ranks) -> None:
        self._portion = portion
        self._published = published
        self._ranks = ranks
        names = [name for part in portion.parts for name in part.model]
        self._pieces = {name: _Piece.of(tensors[name], portion.dtype, ranks) for name in names}
        self._received: list[Tensor] = []
        self._work = self._begin() if ranks.size > 1 else None

    def _begin(self) -> dist.Work | None:
        # Rank 0 has the largest part of every tensor.
        size = sum(piece.size(0, self._ranks.size) for piece in self._pieces.values())
        sent = torch.empty(size, dtype=self._portion.dtype, device=self._ranks.device)
        start = 0
        for piece in self._pieces.values():
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
        bucket = self._portion.bucket
        filled = Filled(bucket, shared[: bucket.nbytes] if shared.is_cuda else new_bytes(bucket.nbytes))
        views = bucket.views(filled.flat)
        for part in self._portion.parts:
            self._publish(part, views)
        # The next bucket's buffers come before this object goes.
        self._received, self._pieces, self._work = [], {}, None
        return filled

    def _publish(self, part: ConvertedTensors, views: Mapping[str, Tensor]) -> None:
        if part.unchanged:
            [own], [target] = part.model, part.published
            torch.cat(self._shards(self._pieces[own]), out=views[target].view(-1))
            return
        whole = {name: torch.cat(self._shards(self._pieces[name])).view(shape) for name, shape in part.model.items()}
        for name, tensor in self._published.publish(part, whole).items():
            views[name].copy_(tensor)

    def _shards(self, piece: _Piece) -> list[Tensor]:
        """What the ranks have of the next tensor."""
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
    """This rank's part of one tensor, flat: rows of it where it is sharded, else all of it."""

    local: Tensor
    shape: tuple[int, ...]
    sharded: bool

    @staticmethod
    def of(tensor: Tensor, dtype: torch.dtype, ranks: Ranks) -> _Piece:
        shape, own = tuple(tensor.shape), tensor.detach()
        if not isinstance(own, DTensor):
            return _Piece(own.to(dtype).reshape(-1), shape, False)
        if own.placements == (Shard(0),) and own.device_mesh.size() == ranks.size:
            return _Piece(own.to_local().to(dtype).reshape(-1), shape, True)
        return _Piece(own.full_tensor().to(dtype).reshape(-1), shape, False)

    def size(self, rank: int, ranks: int) -> int:
        """Elements that `rank` has of it."""
        if not self.sharded:
            return math.prod(self.shape)
        return len(shard_of(self.shape[0], rank, ranks)) * math.prod(self.shape[1:])
