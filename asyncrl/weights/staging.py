"""Where the actor of a fleet holds the version that its servers are getting.

A GPU copies from pinned memory about eight times faster than from any other. To pin all memory in which weights arrive
would take longer than to copy it, so they pass through a few pinned buffers, which stay for the next version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncrl.errors import ConfigError
from asyncrl.weights.manifest import bytes_of, chunks

if TYPE_CHECKING:
    from asyncrl.config.schema import WeightsConfig

CPU = torch.device("cpu")
BUFFERS = 8
"""A thread each, since one alone fills buffers more slowly than the GPU empties them."""

BUFFER_BYTES = 8 << 20


def staging_device(weights: WeightsConfig) -> torch.device:
    """The device of `weights.staging`. Raises ConfigError: this machine has no such GPU."""
    device = torch.device(weights.staging)
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise ConfigError(f"weights.staging={weights.staging}: torch sees {found} GPUs here; name one of them, or cpu")
    return torch.device("cuda", index)


def staged(tensors: Mapping[str, torch.Tensor], device: torch.device) -> Mapping[str, torch.Tensor]:
    """The tensors on `device`: copies, but of those that are there already."""
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors.values()):
        return {name: tensor.detach().to(device) for name, tensor in tensors.items()}

    def pinned() -> torch.Tensor:
        # A thread begins on the first GPU, where pinning would make a context.
        torch.cuda.set_device(device)
        return torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)

    copies = {name: torch.empty(each.shape, dtype=each.dtype, device=device) for name, each in tensors.items()}
    copy_through(pinned, list(tensors.values()), list(copies.values()))
    return copies


def copy_through(
    new_buffer: Callable[[], torch.Tensor], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> None:
    """Copy each source, on the CPU, to the contiguous target of the same shape and dtype, through `BUFFERS` buffers
    uint8[n], which are made and used in a thread each."""
    taken = [bytes_of(source.contiguous()) for source in sources]
    given = [target.view(-1).view(torch.uint8) for target in targets]

    def work(_: int) -> None:
        buffer = new_buffer()
        while True:
            try:
                chunk = remaining.popleft()
            except IndexError:
                return
            part = buffer[: chunk.stop - chunk.start]
            np.copyto(part.numpy(), taken[chunk.part][chunk.start : chunk.stop])
            given[chunk.part][chunk.start : chunk.stop].copy_(part)

    remaining = deque(chunks((len(each) for each in taken), BUFFER_BYTES))
    with ThreadPoolExecutor(BUFFERS, thread_name_prefix="weights-staging") as pool:
        deque(pool.map(work, range(BUFFERS)), maxlen=0)
