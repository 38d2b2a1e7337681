"""Memory of the host for the contents of a GPU.

`OnHost` moves contents there for a while, so that other processes can have the GPU's memory. It empties the storages of
the tensors in place. Views and shards of them, and optimizers that know them, stay as they are. The tensors may not be
read until the contents are back.

`pinned` is memory for a copy, such as one that is written to a file.
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
"""Torch rounds pinned memory up to a power of two, so that pieces of one waste little."""


PORTABLE = 1
"""The driver's flag of memory that all GPUs may copy into at full speed."""


def pinned(tensor: Tensor) -> Tensor:
    """Memory for a copy of a GPU's `tensor`, into which the current GPU copies several times faster than into other
    memory.

    It has no more than the size of the tensor: torch's own would have the next power of two. The system gives the pages
    before the driver pins them, since kernels of other threads wait while that works. Where the driver refuses, it is
    memory as any other: `is_pinned` tells, and copies are slower.
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
    """The driver tells the next kernel of the failure, too, which has nothing to do with it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        logger.debug("the driver said again: %s", error)


def pages(tensor: Tensor) -> Tensor:
    """Host memory like the tensor's, which shares no page with other memory: no page may be pinned twice."""
    memory = torch.frombuffer(mmap(-1, max(1, tensor.nbytes)), dtype=torch.uint8)
    return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class OnHost:
    """The contents of storages on `device`, in memory of the host that is kept for the next time: pinned where the
    device is a GPU."""

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []
        self._taken: list[tuple[torch.UntypedStorage, int]] = []

    def take(self, tensors: Iterable[Tensor]) -> int:
        """Bring the contents of the tensors that are on the device to the host, and free their memory. Returns the
        bytes. Call `put_back` before the next one."""
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
        """Bring the contents back to where they were."""
        for storage, size in self._taken:
            storage.resize_(size)
        for own, host in self._pieces():
            own.copy_(host, non_blocking=True)
        self._finish()
        self._taken = []

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of the storages, uint8[n], each with its place on the host."""
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
    """The storages of a tensor that are on the device: of a shard, or of the parts of a quantized tensor."""
    tensor = tensor.detach()
    if hasattr(tensor, "__tensor_flatten__"):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):  # A DTensor has its mesh there, too.
                yield from _storages(part, device)
    elif tensor.device == device and tensor.numel():
        yield tensor.untyped_storage()
