"""Connects the workers of a group as the ranks of a learner."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.compat.verl.controller.worker import RENDEZVOUS, Worker
from asyncrl.config.schema import LearnerConfig
from asyncrl.errors import ConfigError, DispatchError
from asyncrl.learner.compiling import keep_compiled
from asyncrl.learner.ranks.determinism import be_deterministic
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.launcher import Meeting, Membership
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.machine import process


@contextmanager
def joined_workers(worker: Worker, learner: LearnerConfig, threads: int | None) -> Iterator[Ranks]:
    """Connect the workers of `worker`'s group as ranks until the `with` block ends. `threads` is the number of threads
    of each process.

    A process has only one connection. If it is connected already, a worker that is alone in its group uses that
    connection.

    Raises ConfigError: context or tensor parallelism is configured. Raises DispatchError: the group has several workers
    in one process, or on several nodes; or the group has several workers, and this process is connected already.
    """
    for key, count in {"context_ranks": learner.context_ranks, "tensor_ranks": learner.tensor_ranks}.items():
        if count > 1:
            raise ConfigError(f"learner.{key}={count}: workers cannot divide a sequence; set 1, or use `asyncrl train`")
    process.limit_threads(threads)
    if learner.deterministic:
        be_deterministic()
    if torch.cuda.is_available():
        keep_compiled()
    if worker.world_size == 1 and dist.is_initialized():
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        yield Ranks(0, 1, torch.device(kind), init_device_mesh(kind, (1,), mesh_dim_names=("shards",)))
        return
    if dist.is_initialized():
        raise DispatchError(
            "this process holds a rank of another group already: colocated roles can have only one worker each. For "
            "more workers, give each role a worker group of its own in the same pool"
        )
    member = _member(worker)
    with joined(learner.replicas, learner.rank_timeout_s, member=member, expert_ranks=learner.expert_ranks) as ranks:
        yield ranks


def _member(worker: Worker) -> Membership:
    place = os.environ.get(RENDEZVOUS, "")
    if worker.world_size > 1 and not place:
        raise DispatchError(
            f"{worker.world_size} workers can only share a model as processes of one machine: use RayWorkerGroup with "
            "a pool of one node, such as [2]. For several machines use `asyncrl train` (docs/cluster.md)"
        )
    # Ray may show a worker only its own GPU, as device 0.
    local = worker.local_rank % max(1, torch.cuda.device_count())
    return Membership(worker.rank, local, Meeting(0, worker.world_size, place))
