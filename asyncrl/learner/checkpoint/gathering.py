"""Gathers a sharded model's whole weights on rank 0, in their published format, bucket by bucket. A bucket is a group
of tensors that are gathered at once.

The device of a rank has at most two buckets of gathered weights at a time. Rank 0 also has two or three copies of the
part that is being converted (see modelling/weight_format.py), such as the stacked experts of a layer. The next bucket
is gathered while the caller works with the previous one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from asyncrl.learner.ranks.ranks import Ranks, shard_of
from asyncrl.machine.long_work import tracked
from asyncrl.modelling.adapters import LowRankUpdate, low_rank_updates
from asyncrl.modelling.weight_format import ConvertedTensors, WeightFormat, model_tensors
from asyncrl.weights.buckets import Bucket, GatheredBucket, on_host
from asyncrl.weights.manifest import DTYPES, TensorSpec, dtype_name, new_bytes

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class GatherStep:
    """Tensors of one dtype that are gathered at once. They are all tensors of some `parts` (a part's tensors are
    converted together), and become the published `bucket`."""

    parts: tuple[ConvertedTensors, ...]
    bucket: Bucket

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.bucket.entries[0].dtype]


def plan_gather(weights: WeightFormat, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> list[GatherStep]:
    """Plan the steps in which the weights will be gathered: parameters in `dtype`, and buffers in their own dtype."""
    steps: list[GatherStep] = []
    room = 0
    for part in weights.parts:
        own = weights.buffer_dtypes.get(next(iter(part.model)), dtype)
        entries = tuple(TensorSpec(name, dtype_name(own), shape) for name, shape in part.published.items())
        size = Bucket(entries).nbytes
        if steps and size <= room and steps[-1].dtype == own:
            last = steps.pop()
            steps.append(GatherStep((*last.parts, part), Bucket((*last.bucket.entries, *entries))))
        else:
            steps.append(GatherStep((part,), Bucket(entries)))
            room = bucket_bytes
        room -= size
    return steps


def gather(
    model: nn.Module, steps: Sequence[GatherStep], weights: WeightFormat, ranks: Ranks
) -> Iterator[GatheredBucket]:
    """Yield the published tensors of `model` on rank 0, on its device, in the buckets of a plan. Other ranks yield
    nothing. Each rank merges the adapters into its shards of a bucket before it sends them.

    Every rank must iterate to the end. On a GPU, each bucket overwrites the memory of the bucket before it.
    """
    tensors, updates = model_tensors(model), low_rank_updates(model)
    reuse = ranks.rank == 0 and ranks.device.type != "cpu"
    largest = max((step.bucket.nbytes for step in steps), default=0) if reuse else 0
    shared = torch.empty(largest, dtype=torch.uint8, device=ranks.device)
    last: GatheredBucket | None = None
    for step in steps:
        gathering = _Gathering(step, tensors, updates, weights, ranks)
        if last is not None:
            yield last
        last = gathering.finish(shared)
    if last is not None:
        yield last


def gather_all(model: nn.Module, weights: WeightFormat, dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
    """Gather all published tensors of `model` by name, as copies on rank 0's CPU. Other ranks get an empty dictionary.
    All ranks call this."""
    tensors: dict[str, Tensor] = {}
    steps = plan_gather(weights, dtype)
    buckets = gather(model, steps, weights, ranks)
    for gathered in tracked(buckets, "gathering weights", len(steps), "buckets", ranks.activity):
        tensors |= on_host(gathered)
    return tensors


def own_rows(tensor: Tensor, ranks: Ranks) -> tuple[Tensor, bool]:
    """Return this rank's rows of a tensor of the model, and true; or the whole tensor, and false, if the tensor is not
    divided by rows among the ranks. All ranks call this."""
    own = tensor.detach()
    if not isinstance(own, DTensor):
        return own, False
    is_sharded = own.placements[-1] == Shard(0) and own.device_mesh.size(-1) == ranks.shards
    return (own.to_local() if is_sharded else own.full_tensor()), is_sharded


class _Gathering:
    """One step: communication starts when this object is made, and ends in `finish`."""

    def __init__(
        self,
        step: GatherStep,
        tensors: Mapping[str, Tensor],
        updates: Mapping[str, LowRankUpdate],
        weights: WeightFormat,
        ranks: Ranks,
    ) -> None:
        self._step = step
        self._weights = weights
        self._ranks = ranks
        names = [name for part in step.parts for name in part.model]
        self._shards = {name: _LocalShard.of(tensors[name], step.dtype, ranks, updates.get(name)) for name in names}
        self._received: list[Tensor] = []
        self._work = self._begin() if ranks.shards > 1 and ranks.is_in_first_copy else None

    def _begin(self) -> dist.Work | None:
        # Rank 0 has the largest shard of every tensor.
        size = sum(shard.size(0, self._ranks.shards) for shard in self._shards.values())
        sent = torch.empty(size, dtype=self._step.dtype, device=self._ranks.device)
        start = 0
        for shard in self._shards.values():
            sent[start : start + shard.local.numel()] = shard.local
            start += shard.local.numel()
        if self._ranks.rank == 0:
            self._received = [torch.empty_like(sent) for _ in range(self._ranks.shards)]
        assert self._ranks.mesh is not None
        work: dist.Work | None = dist.gather(
            sent, self._received or None, group=self._ranks.mesh.get_group(-1), async_op=True
        )
        return work

    def finish(self, shared: Tensor) -> GatheredBucket | None:
        """Return the bucket on rank 0, and None on other ranks. On a GPU, the bucket is at the start of `shared`."""
        if self._work is not None:
            self._work.wait()
        if self._ranks.rank != 0:
            return None
        bucket = self._step.bucket
        gathered = GatheredBucket(bucket, shared[: bucket.nbytes] if shared.is_cuda else new_bytes(bucket.nbytes))
        views = bucket.views(gathered.flat)
        for part in self._step.parts:
            self._publish(part, views)
        # Drops the buffers now, since this object is still referenced while the buffers of the next bucket are
        # allocated.
        self._received, self._shards, self._work = [], {}, None
        return gathered

    def _publish(self, part: ConvertedTensors, views: Mapping[str, Tensor]) -> None:
        if part.unchanged:
            [own], [target] = part.model, part.published
            torch.cat(self._next(self._shards[own]), out=views[target].view(-1))
            return
        whole = {name: torch.cat(self._next(self._shards[name])).view(shape) for name, shape in part.model.items()}
        for name, tensor in self._weights.publish(part, whole).items():
            views[name].copy_(tensor)

    def _next(self, shard: _LocalShard) -> list[Tensor]:
        """Take the shards of the next tensor out of the received buffers. `shard` is this rank's shard of that
        tensor."""
        if not self._received:
            return [shard.local]
        shards = []
        for rank, rest in enumerate(self._received):
            size = shard.size(rank, self._ranks.shards)
            shards.append(rest[:size])
            self._received[rank] = rest[size:]
        return shards if shard.is_sharded else shards[:1]


@dataclass(frozen=True, slots=True, eq=False)
class _LocalShard:
    """This rank's part of a tensor of `shape`, flat: some of its rows if it is sharded, else all of it."""

    local: Tensor
    shape: tuple[int, ...]
    is_sharded: bool

    @staticmethod
    def of(tensor: Tensor, dtype: torch.dtype, ranks: Ranks, update: LowRankUpdate | None = None) -> _LocalShard:
        own, is_sharded = own_rows(tensor, ranks)
        if update is not None:
            own = update.added_to(own, is_sharded)
        return _LocalShard(own.to(dtype).reshape(-1), tuple(tensor.shape), is_sharded)

    def size(self, rank: int, ranks: int) -> int:
        """Return the number of the tensor's elements that `rank` has."""
        if not self.is_sharded:
            return math.prod(self.shape)
        return len(shard_of(self.shape[0], rank, ranks)) * math.prod(self.shape[1:])
