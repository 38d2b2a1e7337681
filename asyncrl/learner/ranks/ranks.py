"""The learner's ranks: one process each, on one or several machines, on GPUs with NCCL or on the CPU with gloo.

They send each other tensors and safetensors bytes. Nothing that arrives from a socket is unpickled.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
import zmq
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncrl.config.exits import EXIT_STOPPED
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.learner.ranks.activity import END
from asyncrl.learner.ranks.host_store import HostStore
from asyncrl.learner.ranks.launcher import DEFAULT_TIMEOUTS, Meeting, Membership
from asyncrl.learner.ranks.rendezvous import Caller
from asyncrl.learner.ranks.stopping import Stopping, exit_now
from asyncrl.machine.activity import Activity
from asyncrl.modelling.context import ContextGroup
from asyncrl.modelling.devices import described
from asyncrl.network.interfaces import loopback_interface
from asyncrl.network.keys import ClientKeys

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENDED_BY_LAUNCHER_S = 60.0
"""Seconds between the limit of a stuck rank and the limit of a collective: the launcher, which knows the stuck rank,
ends the ranks first.
"""
EXPERT_MESH = ("replicas", "experts", "parts")
WAIT = timedelta(days=365)
"""Ranks wait at most this long for a rank that waits for the replay."""


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
        own = {name: tensor.detach().cpu().clone() for name, tensor in sums.items() if self.is_first_of_pass_group}
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


def _waiting_mesh() -> DeviceMesh:
    """Return a mesh of all ranks, whose collectives wait for up to WAIT."""
    group = dist.new_group(timeout=WAIT, backend="gloo")
    # torch returns a number instead of a group to a rank that is not in the group. Here every rank is in it.
    assert isinstance(group, dist.ProcessGroup)
    return DeviceMesh.from_group(group, "cpu")


def _open_store(meeting: Meeting, limit_s: float, keys: ClientKeys | None) -> tuple[dist.Store, Caller | None]:
    if meeting.round:
        caller = Caller(zmq.Context.instance(), meeting.place, keys)
        return HostStore(caller, meeting.round, limit_s), caller
    return (dist.FileStore(meeting.place, meeting.size) if meeting.place else dist.HashStore()), None


def context_group(rank: int, size: int, together: int, limit: timedelta, divides_layers: bool = False) -> ContextGroup:
    """Make the group of `rank`: `together` neighbouring ranks. They are on one host if `together` divides the number of
    a host's ranks."""
    # All ranks take part in making every group.
    groups = [dist.new_group(list(range(first, first + together)), limit) for first in range(0, size, together)]
    own = groups[rank // together]
    assert isinstance(own, dist.ProcessGroup)
    return ContextGroup(own.group_name, together, rank % together, divides_layers)


def _check_division(size: int, replicas: int, counts: Mapping[str, int]) -> None:
    """Raises ConfigError: `size` ranks cannot be divided into `replicas` copies of whole groups. `counts` maps each
    configuration key that sets the number of ranks in a group to this number."""
    for key, count in counts.items():
        if size % (replicas * count):
            raise ConfigError(
                f"learner.{key}={count} learner.replicas={replicas}: {size} ranks (cluster.learner_ranks on each host) "
                f"are no multiple of {replicas * count}; change one of the three"
            )


def _shard_mesh(kind: str, size: int, replicas: int) -> DeviceMesh:
    """Return the ranks as [shards], or as [replicas, shards] if there is more than one copy of a model."""
    shape = (size,) if replicas == 1 else (replicas, size // replicas)
    return init_device_mesh(kind, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def _expert_mesh(kind: str, size: int, replicas: int, expert_ranks: int) -> DeviceMesh | None:
    if expert_ranks == 1:
        return None
    shape = (replicas, expert_ranks, size // (replicas * expert_ranks))
    return init_device_mesh(kind, shape, mesh_dim_names=EXPERT_MESH)


@contextmanager
def _stopping_together(ranks: Ranks) -> Iterator[None]:
    """Wait for this rank's GPU if the block ends with StoppedError. If a rank is in the middle of a pass, all ranks
    exit at once instead."""
    try:
        yield
    except StoppedError:
        if ranks.stopping.is_abrupt:
            ranks.stop_if(False)
            exit_now(EXIT_STOPPED)
        if ranks.device.type == "cuda":
            # Queued operations finish, since all ranks left at the same point. NCCL would warn of unfinished
            # operations.
            torch.cuda.synchronize(ranks.device)
        raise


@contextmanager
def joined(
    replicas: int = 1,
    limit_s: float = DEFAULT_TIMEOUTS.stuck,
    keys: ClientKeys | None = None,
    activity: Activity | None = None,
    stopping: Stopping | None = None,
    member: Membership | None = None,
    context_ranks: int = 1,
    expert_ranks: int = 1,
    tensor_ranks: int = 1,
) -> Iterator[Ranks]:
    """Join the ranks. `member` says which of them this process is. If it is None, the ranks are the ones that
    `launcher.run_ranks` started, or this process alone. The ranks disconnect at the end of the block.

    - The ranks hold `replicas` copies of a model. Groups of `expert_ranks` ranks of a copy have all experts of a layer.
    - Groups of `context_ranks` divide the tokens of a pass. Groups of `tensor_ranks` divide the layers as well. At most
      one of these two numbers is more than 1.
    - A collective fails after `limit_s` plus one minute, unless it may wait for the replay.
    - Ranks of several hosts connect to host 0 with `keys`.
    - `activity` and `stopping` belong to this process.

    Raises ConfigError: the ranks of a copy cannot be divided into groups of `context_ranks`, `expert_ranks`, or
    `tensor_ranks`.
    """
    activity, stopping = activity or Activity(), stopping or Stopping()
    member = member or Membership.of_this_process() or Membership(0, 0, Meeting(0, 1, ""))
    meeting, rank, size = member.meeting, member.rank, member.meeting.size
    counts = {"context_ranks": context_ranks, "expert_ranks": expert_ranks, "tensor_ranks": tensor_ranks}
    _check_division(size, replicas, counts)
    # gloo listens even with one rank. Ranks on one machine need only loopback.
    os.environ["GLOO_SOCKET_IFNAME"] = meeting.interface or loopback_interface()
    if size > 1:
        member.start_heartbeat(activity)
    # This variable keeps the store alive: torch uses it until the end, but keeps no reference in Python.
    store, caller = _open_store(meeting, limit_s, keys)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(member.local)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    limit = timedelta(seconds=limit_s + ENDED_BY_LAUNCHER_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    waiting = _waiting_mesh() if size > 1 else None
    try:
        kind = "cuda" if cuda else "cpu"
        device = torch.device(kind, member.local) if cuda else torch.device(kind)
        logger.info("rank %d of %d computes on %s", rank, size, described(device))
        mesh = _shard_mesh(kind, size, replicas)
        together = max(context_ranks, tensor_ranks)
        context = context_group(rank, size, together, limit, tensor_ranks > 1) if together > 1 else None
        experts = _expert_mesh(kind, size, replicas, expert_ranks)
        ranks = Ranks(rank, size, device, mesh, waiting, activity, stopping, context, experts)
        stopping.stop_if = ranks.stop_if
        with _stopping_together(ranks):
            yield ranks
    finally:
        stopping.end()
        # A reference to a gloo group keeps the group's threads alive, and these threads abort a process that exits.
        # Sharded models have such references in cycles, and the collector ignores cycles from before `freeze_heap`.
        gc.unfreeze()
        gc.collect()
        activity.enter(END)
        dist.destroy_process_group()
        if caller is not None:
            caller.close()


def local_size(parameter: nn.Parameter) -> int:
    """Return the number of elements of a parameter that this rank has."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
