"""The learner's ranks: one process each, on one or several machines, on GPUs with NCCL or on the CPU with gloo.

They send each other tensors and safetensors bytes. Nothing that arrives from a socket is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncrl.errors import StoppedError
from asyncrl.learner.ranks.stopping import Stopping
from asyncrl.machine.activity import Activity
from asyncrl.modelling.context import ContextGroup

T = TypeVar("T")

EXPERT_MESH = ("replicas", "experts", "parts")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank, number `rank` of `size`, and the collective operations of all ranks. All ranks must call the methods
    in the same order."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    """The ranks as [shards] or [replicas, shards]; None only if there is one rank without communication."""
    waiting: DeviceMesh | None = None
    """A mesh of the same ranks, whose collectives have no time limit. None only if there is one rank."""
    activity: Activity = field(default_factory=Activity)
    stopping: Stopping = field(default_factory=Stopping)
    context: ContextGroup | None = None
    """This rank's group of ranks that divide the tokens of a pass, and with tensor parallelism also the layers. None:
    each rank has its own passes."""
    expert_mesh: DeviceMesh | None = None
    """A mesh of the same ranks with the dimensions EXPERT_MESH. None: no tokens travel to experts (see
    `expert_ranks`)."""

    @staticmethod
    def alone() -> Ranks:
        """Return the only rank of a process, on the CPU and without communication."""
        return Ranks(0, 1, torch.device("cpu"))

    @property
    def shards(self) -> int:
        """The number of ranks that hold one copy of a model. Ranks 0 to `shards` - 1 hold the first copy."""
        return self.size if self.mesh is None else self.mesh.size(-1)

    @property
    def shard(self) -> int:
        """The number of the shard of a model that this rank holds. Ranks with the same number hold copies of it."""
        return self.rank % self.shards

    @property
    def is_in_first_copy(self) -> bool:
        """True if this rank holds a shard of the first copy of a model."""
        return self.rank < self.shards

    @property
    def context_size(self) -> int:
        """The number of ranks that divide the tokens of a pass."""
        return 1 if self.context is None else self.context.size

    @property
    def pass_groups(self) -> int:
        """The number of pass groups. The ranks of a pass group compute the same passes together."""
        return self.size // self.context_size

    @property
    def pass_group(self) -> int:
        """The number of the pass group that this rank is in."""
        return self.rank // self.context_size

    @property
    def is_first_of_pass_group(self) -> bool:
        """True on one rank of each pass group. Sums over pass groups take a group's values only from this rank."""
        return self.context is None or self.context.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over ranks, on the device of `values`, which do not change. A sum on the CPU does
        not wait for the GPU."""
        self.activity.advance()
        total = values.clone()
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def sum_pass_groups(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over pass groups of `values`, which are equal on all ranks of a group."""
        return self.sum(values if self.is_first_of_pass_group else torch.zeros_like(values))

    def merge(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the sum over pass groups of each named tensor, on the CPU. All ranks of a group have the same tensors.
        A group may lack names that other groups have."""
        own = on_host(sums) if self.is_first_of_pass_group else {}
        gathered = [own]
        if self.size > 1:
            gathered = [safetensors.torch.load(each) for each in self._gather_bytes(safetensors.torch.save(own))]
        names = dict.fromkeys(name for each in gathered for name in each)
        return {name: torch.stack([each[name] for each in gathered if name in each]).sum(0) for name in names}

    def _gather_bytes(self, own: bytes) -> list[bytes]:
        """Return the bytes of every rank, in the order of the ranks."""
        sizes = self.sum(torch.eye(self.size, dtype=torch.int64)[self.rank] * len(own)).tolist()
        sent = torch.zeros(max(sizes), dtype=torch.uint8)
        sent[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent)
        return [each[:size].numpy().tobytes() for each, size in zip(received, sizes, strict=True)]

    def stop_if(self, stopped: bool, updating: bool | None = None, within_pass: bool = False) -> None:
        """Raises StoppedError on every rank if `stopped` is true on any rank, so that no rank waits for a rank that
        ended. `updating`: weights change after this call. If it is None, `stopping.is_updating` does not change.
        `within_pass`: the helper thread of `stopping` calls this, since the main thread of this rank is in the middle
        of a pass.
        """
        with self.stopping.lock:
            self.activity.advance()
            ranks = torch.tensor([int(stopped), int(within_pass)])
            if self.waiting is not None:
                dist.all_reduce(ranks, group=self.waiting.get_group())
            anybody, abruptly = ranks.tolist()
            self.stopping.is_stopping |= anybody > 0
            self.stopping.is_abrupt |= abruptly > 0
            if updating is not None:
                self.stopping.is_updating = updating and not anybody
        if anybody:
            raise StoppedError("the learner was asked to stop")

    def together(self, request: Callable[[], T]) -> T:
        """Make `request` and return its result. The request may wait for the replay or the disk for any time. Raises
        StoppedError on every rank if the request of one rank raises it."""
        answers: list[T] = []
        with suppress(StoppedError), self.activity.waiting():
            answers.append(request())
        self.stop_if(not answers)
        return answers[0]

    def largest(self, value: float) -> float:
        """Return the largest of the ranks' values."""
        values = torch.zeros(self.size, dtype=torch.float64)
        values[self.rank] = value
        return float(self.sum(values).max())

    def any(self, value: bool) -> bool:
        """True if `value` is true on any rank."""
        return bool(self.sum(torch.tensor(int(value))))

    def agree(self, value: int) -> int:
        """Return the value of rank 0."""
        return int(self.sum(torch.tensor(value if self.rank == 0 else 0, dtype=torch.int64)))

    def barrier(self) -> None:
        """Return once every rank has called this."""
        self.sum(torch.zeros(()))


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors on the CPU, with the same bits. All tensors of a GPU come in one transfer."""
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor.is_cpu}
    # Each transfer makes the host wait for the GPU, and the sums of a step are dozens of single numbers.
    on_gpu = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.is_cpu}
    if on_gpu:
        copies |= from_bytes(as_bytes(on_gpu.values()).cpu(), on_gpu)
    return {name: copies[name] for name in tensors}


def as_bytes(tensors: Iterable[Tensor]) -> Tensor:
    """Return the bytes of all tensors of one device, one tensor after the other, as uint8[bytes]."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def from_bytes(joined: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose bytes are in `joined` uint8[bytes], with the names, shapes and dtypes of `like`."""
    parts = joined.split([tensor.nbytes for tensor in like.values()])
    # A clone begins at an address that suits its dtype.
    return {
        name: part.clone().view(tensor.dtype).reshape(tensor.shape)
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


def shard_of(rows: int, rank: int, ranks: int) -> range:
    """Return the rows of a sharded tensor that FSDP puts on `rank`."""
    share = -(-rows // ranks)
    return range(min(rows, rank * share), min(rows, (rank + 1) * share))


def sharded(parameter: nn.Parameter, ranks: Ranks) -> nn.Parameter:
    """Return this rank's rows of a parameter, as FSDP would have them."""
    assert ranks.mesh is not None
    own = shard_of(len(parameter), ranks.shard, ranks.shards)
    rows = parameter.detach()[own.start : own.stop].clone()
    # A model that was loaded whole is on the host.
    rows = rows if rows.is_meta else rows.to(ranks.device)
    placements = [*([Replicate()] * (ranks.mesh.ndim - 1)), Shard(0)]
    whole = DTensor.from_local(rows, ranks.mesh, placements, shape=parameter.shape, stride=parameter.stride())
    return nn.Parameter(whole, parameter.requires_grad)


def local_size(parameter: nn.Parameter) -> int:
    """Return the number of elements of a parameter that this rank has."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
