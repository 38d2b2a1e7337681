"""An update of servers: one version of the weights, in the forms that the routes into servers need."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch

from asyncrl.engine.fleet.folders import Folders
from asyncrl.errors import UnavailableError, WeightsError
from asyncrl.weights.canary import CanaryCheck
from asyncrl.weights.folders import Folder, Weights, tensors_of
from asyncrl.weights.manifest import TensorSpec, bytes_of, places, specs_of
from asyncrl.weights.threads import in_own_thread

CPU = torch.device("cpu")
BUFFERS = 8
"""The number of buffers, each with a thread. A single thread would fill buffers more slowly than a GPU empties them."""

BUFFER_BYTES = 8 << 20

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]


class Update:
    """The weights of `version` as they arrived: tensors, or a folder of `folders`.

    `label` names the weights on servers. Each server must pass the `check` before it serves the weights. The weights
    are read, copied to a device or written to a folder when the first server needs that form. Then all servers share
    the result.
    """

    def __init__(
        self,
        version: int,
        label: str,
        weights: Weights,
        folders: Folders | None = None,
        check: CanaryCheck | None = None,
    ) -> None:
        self.version = version
        self.label = label
        self.check = check
        self._weights = weights
        self._folders = folders
        self._copies: dict[torch.device, _Once[Tensors]] = {}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The name, shape and dtype of each tensor, in the order of the tensors."""
        return self._weights.manifest.tensors if isinstance(self._weights, Folder) else specs_of(self._weights)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    def is_on(self, device: torch.device) -> bool:
        """True if the tensors arrived on `device`."""
        weights = self._weights
        return not isinstance(weights, Folder) and all(tensor.device == device for tensor in weights.values())

    async def tensors(self, device: torch.device = CPU) -> Tensors:
        """Get all tensors on `device`. Raises WeightsError: the folder that has them cannot be read."""
        copy = self._copies.setdefault(device, _Once(partial(_on_device, self._weights, device)))
        try:
            return await copy.get()
        except UnavailableError as error:
            raise WeightsError(f"version {self.version} cannot be read: {error}") from error

    async def folder(self) -> Path:
        """Get the folder of this version. The folder stays while the version is `kept`. Raises WeightsError: it cannot
        be written."""
        if isinstance(self._weights, Folder):
            return self._weights.path
        assert self._folders is not None
        return await in_own_thread(partial(self._folders.write, self.version, self._weights))

    def drop_copies(self) -> None:
        """Free the copies on GPUs. They are made again when they are needed."""
        for device in [each for each in self._copies if each.type == "cuda"]:
            del self._copies[device]
        give_back_memory()

    def kept(self) -> AbstractContextManager[None]:
        """Keep the folder of this version, if it has one, within the context, even if many newer versions follow."""
        return nullcontext() if self._folders is None else self._folders.reading(self._folders.path(self.version))


class _Once(Generic[T]):
    """The result of `make`, computed in a thread on first use, and again after a failure."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._task: asyncio.Task[T] | None = None

    async def get(self) -> T:
        if self._task is None or (self._task.done() and self._task.exception()):
            self._task = asyncio.create_task(in_own_thread(self._make))
        return await asyncio.shield(self._task)


def give_back_memory() -> None:
    """Return unused GPU memory of this process to the system."""
    if torch.cuda.is_initialized():
        # This frees the memory that servers read through handles, once they have dropped the handles.
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _on_device(weights: Weights, device: torch.device) -> Tensors:
    return on_device(tensors_of(weights), device)


def on_device(tensors: Tensors, device: torch.device) -> Tensors:
    """Copy tensors to `device`. Tensors that are on `device` already are shared."""
    # A GPU copies from pinned memory about eight times as fast as from other memory, but pinning all weights takes
    # longer than copying them. So the weights pass through a few pinned buffers.
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors.values()):
        return {name: tensor.detach().to(device) for name, tensor in tensors.items()}

    copies = {name: torch.empty(each.shape, dtype=each.dtype, device=device) for name, each in tensors.items()}
    copy_from_host(list(tensors.values()), list(copies.values()))
    return copies


def copy_from_host(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy each source, which is on the CPU, to its target: a contiguous tensor of the same shape and dtype. All
    targets are on one device."""
    device = targets[0].device

    def pinned() -> torch.Tensor:
        if device.type == "cuda":
            # A new thread's current device is the first GPU. Without this call, pinning would make a context there.
            torch.cuda.set_device(device)
        return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")

    copy_through(pinned, sources, targets)


def copy_through(
    new_buffer: Callable[[], torch.Tensor],
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Copy each source, which is on the CPU, to its target: a contiguous tensor of the same shape and dtype. `BUFFERS`
    threads copy, each through its own buffer, uint8[buffer_bytes].
    """
    given = [bytes_of(source.contiguous()) for source in sources]
    taken = [target.view(-1).view(torch.uint8) for target in targets]
    edges = list(accumulate(map(len, given), initial=0))

    def work(_: int) -> None:
        buffer = new_buffer()
        while True:
            try:
                start = remaining.popleft()
            except IndexError:
                return
            for index, where in places(edges, start, min(start + buffer_bytes, edges[-1])):
                part = buffer[: where.stop - where.start]
                np.copyto(part.numpy(), given[index][where])
                taken[index][where].copy_(part)

    remaining = deque(range(0, edges[-1], buffer_bytes))
    with ThreadPoolExecutor(BUFFERS, thread_name_prefix="weights-to-gpu") as pool:
        deque(pool.map(work, range(BUFFERS)), maxlen=0)
