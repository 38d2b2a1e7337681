"""Keeps the contents of a GPU's memory in the host's memory.

`OnHost` moves contents to the host for a while, so that other processes can use the GPU's memory. It empties the
storages of the tensors in place, so views, shards and optimizers of these tensors need no change. The tensors must not
be read until the contents are back.

`pinned` allocates memory for a copy, such as a checkpoint.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from mmap import mmap

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 28
"""The size of pinned pieces. It is a power of two, since torch rounds the size of pinned memory up to a power of
two."""


PORTABLE = 1
"""The driver's flag for memory that all GPUs may copy into at full speed."""


def pinned(tensor: Tensor) -> Tensor:
    """Allocate pinned memory for a copy of a GPU's `tensor`. The current GPU copies into it several times faster than
    into other memory.

    The memory is as large as the tensor, while torch would round the size of pinned memory up to a power of two. The
    pages are written before the driver pins them, so that pinning is short: kernels of other threads wait for it. If
    the driver refuses, the memory is not pinned (`is_pinned`), and copies are slower.
    """
    buffer = pages(tensor)
    if not buffer.nbytes:
        return buffer
    buffer.zero_()
    driver = torch.cuda.cudart()
    try:
        torch.cuda.check_error(driver.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, PORTABLE))
    except RuntimeError as error:
        _forget_failure()
        logger.debug("%d bytes of host memory are not pinned: %s", buffer.nbytes, error)
        return buffer
    weakref.finalize(buffer, driver.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer


def _forget_failure() -> None:
    """Clear the driver's error, which the driver would otherwise report again at the next kernel."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        logger.debug("the driver reported again: %s", error)


def pages(tensor: Tensor) -> Tensor:
    """Allocate host memory for a copy of `tensor`. The memory shares no page with other memory, since no page may be
    pinned twice."""
    memory = torch.frombuffer(mmap(-1, max(1, tensor.nbytes)), dtype=torch.uint8)
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class OnHost:
    """Moves contents of storages on `device` to host memory and back. The host memory is kept for later moves, and is
    pinned if the device is a GPU."""

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._taken: list[tuple[torch.UntypedStorage, int]] = []

    def take(self, tensors: Iterable[Tensor]) -> int:
        """Move the contents of tensors on the device to the host, and free their memory on the device. Returns the
        number of bytes. Call `put_back` before the next `take`."""
        assert not self._taken
        storages = {each.data_ptr(): each for tensor in tensors for each in _storages(tensor, self._device)}
        self._taken = [(each, each.nbytes()) for each in storages.values() if each.resizable()]
        for own, host in self._pieces():
            host.copy_(own, non_blocking=True)
        self._finish()
        for storage, _ in self._taken:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return sum(size for _, size in self._taken)

    def put_back(self) -> None:
        """Move the contents back to the device."""
        for storage, size in self._taken:
            storage.resize_(size)
        for own, host in self._pieces():
            own.copy_(host, non_blocking=True)
        self._finish()
        self._taken = []

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of the storages, uint8[n], each with its host memory."""
        start = 0
        for storage, size in self._taken:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            edges = sorted({0, size, *range(-start % self._chunk_bytes, size, self._chunk_bytes)})
            for left, right in pairwise(edges):
                index, offset = divmod(start + left, self._chunk_bytes)
                yield whole[left:right], self._chunk(index)[offset : offset + right - left]
            start += size

    def _chunk(self, index: int) -> Tensor:
        if index == len(self._chunks):
            pinned = self._device.type == "cuda"
            self._chunks.append(torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=pinned))
        return self._chunks[index]

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _storages(tensor: Tensor, device: torch.device) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor that are on the device. The tensor may be a shard, or a quantized tensor that
    consists of parts."""
    tensor = tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):  # One attribute of a DTensor is its mesh.
                yield from _storages(part, device)
    elif tensor.device == device and tensor.numel():
        yield tensor.untyped_storage()
