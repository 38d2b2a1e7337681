"""Handles of GPU memory: a server on the same machine copies the weights from the actor's memory.

The body has the form of SGLang's `flattened_bucket`: one pickle for each rank, with a buffer uint8[n] and the layout of
its tensors. The server's unpickler accepts known names only, and this process has no SGLang to write such a pickle.

So the buffer is pickled as a call of torch's rebuild function. SGLang's servers replace this function by one that finds
a GPU by its uuid, since indices differ between processes. The layout is pickled as plain namespaces, because the server
reads only attributes. SGLang 0.5.17 and 0.5.23 accept these pickles.

Torch counts the processes that use a buffer. It keeps the buffer's memory until each process has opened its handle and
dropped the buffer. A server does so when its copies are done. So the actor drops a buffer once the server has answered.
"""

from __future__ import annotations

import base64
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from asyncrl.engine.fleet.http import ServerRefusedError
from asyncrl.engine.fleet.update import CPU, Update, give_back_memory
from asyncrl.engine.sglang.families import request_group
from asyncrl.engine.sglang.routes.base import BucketServerRoute, ServerEnd
from asyncrl.weights.buckets import Bucket, tight_buckets
from asyncrl.weights.manifest import DTYPES

logger = logging.getLogger(__name__)

DEVICE = 6
"""The position of the device in the arguments of torch's rebuild function."""

COUNTER = slice(11, 13)
"""The position of the counter of processes that use the buffer: a file and an offset."""

LEAST_BUCKET_BYTES = 64 << 20
"""The minimum size of buckets. Smaller buckets need so many requests that other routes are as fast."""
TIGHT_PART = 4
"""Buckets may always take 1 / TIGHT_PART of the free memory, even if this leaves less than the reserve."""

Reduced = tuple[Callable[..., torch.Tensor], tuple[Any, ...]]


class IpcServerRoute(BucketServerRoute):
    """Posts handles of buffers on `device`, a GPU of the server, to `/update_weights_from_tensor`.

    If the GPU has no room for a second copy of the weights, versions stay in host memory, and only two buckets are on
    the GPU. `reserve_bytes` of the free memory stay free for the server's work. If less than that is free, buckets are
    smaller, and most of the free memory stays free.
    """

    def __init__(self, end: ServerEnd, device: torch.device, bucket_bytes: int, reserve_bytes: int = 0) -> None:
        super().__init__(end, device, bucket_bytes)
        self._reserve_bytes = reserve_bytes
        self._source = device

    async def prepare(self, update: Update) -> None:
        with _refused_without_room(self.device):
            await super().prepare(update)

    def plan(self, update: Update) -> list[Bucket]:
        """Plan the largest buckets that fit. Raises ServerRefusedError: even the smallest buckets do not fit."""
        room = self._room()
        usable = max(room - self._reserve_bytes, room // TIGHT_PART)
        bucket_bytes = self.bucket_bytes
        while (needed := _together(buckets := tight_buckets(update.specs, bucket_bytes, request_group))) > usable:
            bucket_bytes //= 2
            if bucket_bytes < LEAST_BUCKET_BYTES:
                raise ServerRefusedError(
                    f"{self.device} has {room >> 20} MB free, of which weights may take {usable >> 20}, and "
                    f"{needed >> 20} are needed"
                )
        return buckets

    async def source(self, update: Update) -> torch.device:
        # The weights count twice: a version is kept for servers that join late, while the next version needs memory
        # too.
        needed = _together(self.plan(update)) + self._reserve_bytes + 2 * update.nbytes
        source = self.device if update.is_on(self.device) or self._room() >= needed else CPU
        if source != self._source:
            self._source = source
            where = "on the GPU" if source == self.device else "in host memory, since the GPU has no room for them"
            logger.info("versions for %s are kept %s", self.end.url, where)
            if source == CPU:
                # GPU memory is short, so this process returns the copy of the last version, which is no longer used.
                give_back_memory()
        return source

    def _room(self) -> int:
        """The bytes of GPU memory that are free, or that this process has reserved."""
        return torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)

    async def send(self, update: Update) -> None:
        # A later bucket might not fit although the first one did.
        with _refused_without_room(self.device):
            async with self.end.updating(), aclosing(self.buckets(update)) as made:
                async for bucket, flat, body in made:
                    with shared(flat, self.end.ranks) as buffers:
                        # Without `del`, the traceback of an error would keep the buffer.
                        del flat
                        request = {**body, "serialized_named_tensors": handles_of(bucket, buffers)}
                        await self.end.post("/update_weights_from_tensor", request)


def _together(buckets: Sequence[Bucket]) -> int:
    """The maximum bytes that two consecutive buckets take together. A tensor may be larger than the size of buckets."""
    return max(map(sum, pairwise([0, *(bucket.nbytes for bucket in buckets)])))


@contextmanager
def _refused_without_room(device: torch.device) -> Iterator[None]:
    """Raises ServerRefusedError, so that another route is tried: `device` has no memory left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ServerRefusedError(f"{device} has no room for a bucket: {error}") from error


@contextmanager
def shared(flat: torch.Tensor, processes: int) -> Iterator[list[Reduced]]:
    """Make a handle of a buffer on a GPU for each of `processes` other processes.

    After an error in the `with` block the memory is released at once, because a handle that was never opened would keep
    it.
    """
    reduced: list[Reduced] = []
    try:
        reduced.extend(reductions.reduce_tensor(flat) for _ in range(processes))
        del flat
        yield [_by_uuid(each) for each in reduced]
    except BaseException:
        # A process may still be reading. This is harmless: weights are used only after a whole update has succeeded.
        for _, arguments in reduced:
            torch.UntypedStorage._release_ipc_counter(*arguments[COUNTER])
        raise


def _by_uuid(reduced: Reduced) -> Reduced:
    rebuild, arguments = reduced
    device = str(torch.cuda.get_device_properties(arguments[DEVICE]).uuid)
    return rebuild, (*arguments[:DEVICE], device, *arguments[DEVICE + 1 :])


def handles_of(bucket: Bucket, buffers: list[Reduced]) -> list[str]:
    """The pickle for each rank: the rank's handle and the bucket's layout. All `buffers` are handles of the same
    memory."""
    layout = [
        SimpleNamespace(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=DTYPES[entry.dtype],
            start_idx=start,
            end_idx=start + entry.nbytes,
            numel=entry.nbytes,
        )
        for entry, start in bucket.placed()
    ]
    payloads = [pickle.dumps({"flattened_tensor": _Buffer(each), "metadata": layout}) for each in buffers]
    return [base64.b64encode(each).decode() for each in payloads]


class _Buffer:
    """A buffer that is pickled as the call that rebuilds it."""

    def __init__(self, reduced: Reduced) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Reduced:
        return self._reduced
