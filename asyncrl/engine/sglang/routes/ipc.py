"""Handles of GPU memory: a server on the same machine copies the weights from the actor's memory.

A server that an actor started keeps one buffer for whole versions open (see kept.py). Any other server gets each
version in buckets (see handles.py). A server drops a bucket when its copies are done, and so does the actor once the
server has answered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from itertools import pairwise

import torch

from asyncrl.engine.fleet.http import ServerRefusedError
from asyncrl.engine.fleet.update import CPU, Update, give_back_memory
from asyncrl.engine.sglang.families import request_group
from asyncrl.engine.sglang.inside import LOADER
from asyncrl.engine.sglang.routes.base import BucketServerRoute, ServerEnd
from asyncrl.engine.sglang.routes.handles import handles_of, shared
from asyncrl.engine.sglang.routes.kept import KeptBuffer, whole_bucket
from asyncrl.weights.buckets import Bucket, tight_buckets

logger = logging.getLogger(__name__)

LEAST_BUCKET_BYTES = 64 << 20
"""The minimum size of buckets. Smaller buckets need so many requests that other routes are as fast."""
TIGHT_PART = 4
"""Buckets may always take 1 / TIGHT_PART of the free memory, even if this leaves less than the reserve."""


class IpcServerRoute(BucketServerRoute):
    """Posts handles of buffers on `device`, a GPU of the server, to `/update_weights_from_tensor`.

    If the GPU has no room for a second copy of the weights, versions stay in host memory, and only two buckets are on
    the GPU. `reserve_bytes` of the free memory stay free for the server's work. If less than that is free, buckets are
    smaller, and most of the free memory stays free.

    If the server keeps a buffer open, and the GPU has room for it, each version goes through this buffer (see kept.py).
    """

    def __init__(self, end: ServerEnd, device: torch.device, bucket_bytes: int, reserve_bytes: int = 0) -> None:
        super().__init__(end, device, bucket_bytes)
        self._reserve_bytes = reserve_bytes
        self._source = device
        self._kept = KeptBuffer(device)
        self._in_kept: Update | None = None
        self._why_buckets = ""

    async def prepare(self, update: Update) -> None:
        self._in_kept = None
        with _refused_without_room(self.device):
            if self._fits_whole(whole := whole_bucket(update.specs)):
                await self._drop()
                await self._kept.fill(whole, await update.tensors(self._source_of(update, whole.nbytes)))
                self._in_kept = update
            else:
                self._kept.drop()
                await super().prepare(update)

    def _fits_whole(self, whole: Bucket) -> bool:
        """True if versions go through one buffer that the server keeps open. Logs the reason if they do not."""
        reason = self.end.keeps_none
        # A buffer that the server has opened takes its memory until the server closes it.
        if not reason and not self._kept.is_for(whole):
            # In addition to the buffer, a copy of the version may wait on the GPU.
            needed, room = 2 * whole.nbytes + self._reserve_bytes, self._room()
            if needed > room:
                reason = f"{self.device} has {room >> 20} MB free, and {needed >> 20} are needed for a kept buffer"
        if reason and reason != self._why_buckets:
            logger.info("weights go into %s in buckets, and are loaded by name: %s", self.end.url, reason)
        self._why_buckets = reason
        return not reason

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
        return self._source_of(update, _together(self.plan(update)))

    def _source_of(self, update: Update, buffers: int) -> torch.device:
        """The device where the version waits, if buffers take `buffers` bytes."""
        # The weights count twice: a version is kept for servers that join late, while the next version needs memory
        # too.
        needed = buffers + self._reserve_bytes + 2 * update.nbytes
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
        if self._in_kept is not update and not self.has_first(update):
            await self.prepare(update)
        if self._in_kept is update:
            return await self._send_whole(update)
        # A later bucket might not fit although the first one did.
        with _refused_without_room(self.device):
            async with self.end.updating(), aclosing(self.buckets(update)) as made:
                async for bucket, flat, body in made:
                    with shared(flat, self.end.ranks) as buffers:
                        # Without `del`, the traceback of an error would keep the buffer.
                        del flat
                        request = {**body, "serialized_named_tensors": handles_of(bucket, buffers)}
                        await self.end.post("/update_weights_from_tensor", request)

    async def _send_whole(self, update: Update) -> None:
        body = {"load_format": LOADER, "flush_cache": False, "weight_version": update.label}
        try:
            async with self.end.updating():
                request = {**body, "serialized_named_tensors": [self._kept.message()]}
                await self.end.post("/update_weights_from_tensor", request)
        except BaseException:
            self._in_kept = None
            self._kept.drop()
            raise
        self._kept.opened()

    async def reset(self) -> None:
        await super().reset()
        self._in_kept = None
        self._kept.drop()


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
