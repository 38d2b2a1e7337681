"""A process group of the learner (rank 0) and some engines, separate from torch's default group, with bounded waits.

Neither gloo nor NCCL encrypts, and any program that reaches the store can join. Use loopback or a trusted network.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist

from asyncrl.errors import UnavailableError
from asyncrl.weights.manifest import Manifest, Size
from asyncrl.weights.threads import begin

AT_ONCE = 2
"""The maximum number of broadcasts that a rank has begun and not finished. Each may take up to AT_ONCE *
`timeout_s`."""

logger = logging.getLogger(__name__)

OPENING_S = 30.0
"""The time in which the learner must have reached its own store. A busy machine may need longer for this than a request
may wait."""
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def gpu_of(device: torch.device) -> str:
    """Return the uuid of a GPU, which is the same in every process, or "" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def open_store(host: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """Open the learner's store on a free port. The store listens only at `host`. Requests to it wait for at most
    `timeout_s`. Returns the store and the port."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.bind((host, 0))
    listening.listen()
    port: int = listening.getsockname()[1]
    opening = timedelta(seconds=OPENING_S)
    store = dist.TCPStore(
        host, port, None, True, opening, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    return store, port


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect an engine to the learner's store. Raises UnavailableError: the store does not answer within
    `timeout_s`."""
    try:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
    except RuntimeError as error:
        raise UnavailableError(f"the learner's store at {host}:{port} cannot be reached: {error}") from error


def torch_group(store: dist.Store, rank: int, size: int, device: torch.device, address: str, wait: timedelta) -> Any:
    """Make torch's process group: NCCL between GPUs, else gloo."""
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = wait
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    backend: Any = dist.ProcessGroupGloo
    gloo = backend._Options()
    gloo._timeout = wait
    gloo._devices = [backend.create_device(hostname=address)]
    return backend(store, rank, size, gloo)


class BroadcastCall(msgspec.Struct, frozen=True):
    """A call to an engine to take part in a broadcast.

    - `manifest`: the tensors without checksums.
    - `counts`: the number of tensors in each bucket.
    - `host` and `port`: the address of the learner's store.
    - `group`: the name of the group in that store.
    - `rank`: the engine's rank among the `size` ranks of the group.
    """

    manifest: Manifest
    counts: tuple[Size, ...]
    host: str
    port: int
    group: str
    rank: Annotated[int, msgspec.Meta(ge=1)] = 1
    size: Annotated[int, msgspec.Meta(ge=2)] = 2


class WeightGroup:
    """Rank `rank` of `size` in the group `name` of a store. `address` is this machine's address. Raises
    UnavailableError: the group cannot be formed. `begin`, `transferred` and `finish` also raise UnavailableError if
    another rank is silent for `timeout_s` or has ended. After such an error the group cannot be used. `hung` is a call
    into torch that did not return in time. `backend` makes torch's process group.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        size: int,
        device: torch.device,
        address: str,
        timeout_s: float,
        backend: Callable[..., Any] = torch_group,
    ) -> None:
        self._wait = timedelta(seconds=timeout_s)
        self.hung: Future[dist.Work] | None = None
        # A broadcast may wait for the one before it, and its time limit runs meanwhile. So the limit covers both.
        limit = AT_ONCE * self._wait
        try:
            self._group: Any = backend(dist.PrefixStore(name, store), rank, size, device, address, limit)
        except RuntimeError as error:
            raise UnavailableError(f"the weight group could not be formed: {error}") from error

    def begin(self, tensor: torch.Tensor) -> dist.Work:
        """Begin to broadcast `tensor` from rank 0, or to receive it on other ranks. The tensor must not change until
        `finish`."""
        # The stream is looked up here, since the thread that runs the broadcast has another current stream and device.
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        # Each broadcast runs in a thread of its own: in the first broadcast NCCL forms the group, and never returns if
        # another rank could not join.
        broadcast = begin(partial(_broadcast, self._group, tensor, stream), "weights-group", daemon=True)
        try:
            return broadcast.result(self._wait.total_seconds())
        except TimeoutError as error:
            self.hung = broadcast
            raise UnavailableError(f"a broadcast could not begin in {self._wait.total_seconds():g} s") from error
        except RuntimeError as error:
            raise UnavailableError(f"a broadcast could not begin: {error}") from error

    def transferred(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Broadcast one tensor after the other. Yields each once it is sent or received, while the next is being
        transferred."""
        under_way: deque[tuple[torch.Tensor, dist.Work]] = deque()
        for tensor in tensors:
            under_way.append((tensor, self.begin(tensor)))
            if len(under_way) == AT_ONCE:
                yield self._finished(*under_way.popleft())
        for tensor, work in under_way:
            yield self._finished(tensor, work)

    def _finished(self, tensor: torch.Tensor, work: dist.Work) -> torch.Tensor:
        self.finish(work)
        return tensor

    def finish(self, work: dist.Work) -> None:
        """Return once `work` is done."""
        try:
            work.wait(self._wait)
        except RuntimeError as error:
            raise UnavailableError(f"a broadcast failed: {error}") from error

    def close(self) -> None:
        """End the running broadcasts, on the other ranks too. Before this call, drop all results of `begin`. Do not use
        the group afterwards."""
        try:
            # An abort would wait for a call that hangs, so a group with such a call is not aborted.
            if self.hung is None:
                self._group.abort()
        except RuntimeError as error:
            logger.warning("a weight group did not end well: %s", error)
        # gloo closes a group's connections only when the last reference to the group is dropped. The other ranks then
        # notice the end.
        self._group = None


def _broadcast(group: Any, tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    with torch.cuda.stream(stream):
        work: dist.Work = group.broadcast([tensor], options)
    return work


def sum_of(flat: torch.Tensor) -> torch.Tensor:
    """Compute the checksum int64[] of a buffer whose size is a multiple of 8, on the buffer's device."""
    return flat.view(torch.int64).sum()
