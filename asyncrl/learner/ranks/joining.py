"""Joins the ranks of the learner: connects their processes, and divides them into copies and groups."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import zmq
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.config.exits import EXIT_STOPPED
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.learner.ranks.activity import END
from asyncrl.learner.ranks.host_store import HostStore
from asyncrl.learner.ranks.launcher import DEFAULT_TIMEOUTS, Meeting, Membership
from asyncrl.learner.ranks.ranks import EXPERT_MESH, Ranks
from asyncrl.learner.ranks.rendezvous import Caller
from asyncrl.learner.ranks.stopping import Stopping, exit_now
from asyncrl.machine.activity import Activity
from asyncrl.modelling.context import ContextGroup
from asyncrl.modelling.devices import described
from asyncrl.network.interfaces import loopback_interface
from asyncrl.network.keys import ClientKeys

logger = logging.getLogger(__name__)


ENDED_BY_LAUNCHER_S = 60.0
"""Seconds between the limit of a stuck rank and the limit of a collective: the launcher, which knows the stuck rank,
ends the ranks first.
"""
WAIT = timedelta(days=365)
"""Ranks wait at most this long for a rank that waits for the replay."""


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
                f"are not a multiple of {replicas * count}; change one of the three"
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
def _connected(
    member: Membership, limit_s: float, limit: timedelta, keys: ClientKeys | None, activity: Activity
) -> Iterator[torch.device]:
    """Connect this rank to all others, and return its device. A collective fails after `limit`. The ranks disconnect at
    the end of the block."""
    meeting = member.meeting
    # gloo listens even with one rank. Ranks on one machine need only loopback.
    os.environ["GLOO_SOCKET_IFNAME"] = meeting.interface or loopback_interface()
    # This variable keeps the store alive: torch uses it until the end, but keeps no reference in Python.
    store, caller = _open_store(meeting, limit_s, keys)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(member.local)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=member.rank, world_size=meeting.size, timeout=limit)
    try:
        yield torch.device("cuda", member.local) if cuda else torch.device("cpu")
    finally:
        # A reference to a gloo group keeps the group's threads alive, and these threads abort a process that exits.
        # Sharded models have such references in cycles, and the collector ignores cycles from before `freeze_heap`.
        gc.unfreeze()
        gc.collect()
        activity.enter(END)
        dist.destroy_process_group()
        if caller is not None:
            caller.close()


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
    rank, size = member.rank, member.meeting.size
    counts = {"context_ranks": context_ranks, "expert_ranks": expert_ranks, "tensor_ranks": tensor_ranks}
    _check_division(size, replicas, counts)
    if size > 1:
        member.start_heartbeat(activity)
    limit = timedelta(seconds=limit_s + ENDED_BY_LAUNCHER_S)
    with _connected(member, limit_s, limit, keys, activity) as device:
        try:
            waiting = _waiting_mesh() if size > 1 else None
            logger.info("rank %d of %d computes on %s", rank, size, described(device))
            mesh = _shard_mesh(device.type, size, replicas)
            together = max(context_ranks, tensor_ranks)
            context = context_group(rank, size, together, limit, tensor_ranks > 1) if together > 1 else None
            experts = _expert_mesh(device.type, size, replicas, expert_ranks)
            ranks = Ranks(rank, size, device, mesh, waiting, activity, stopping, context, experts)
            stopping.stop_if = ranks.stop_if
            with _stopping_together(ranks):
                yield ranks
        finally:
            stopping.end()
